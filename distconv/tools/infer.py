"""`infer`: a network applied to whole volumes, from file to file, as one device would compute it.

If the ranks together lack the memory for a volume, it is processed in slabs along its longest
dimension. A slab is read with a halo, so that the outputs that are kept are exact.
"""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from distconv.data.durable import StepwiseFile
from distconv.data.errors import DataError, check_alike, together
from distconv.data.sources.interface import Coordinate, Source
from distconv.data.sources.opening import Field, open_sources
from distconv.data.writing.formats import Description
from distconv.data.writing.save import (
    check_sink,
    commit_file,
    create_file,
    describe,
    kind_to_write,
    write_block,
)
from distconv.geometry.layout import Box, default_cuts, rank_box, replaced_at
from distconv.grid.process_grid import ProcessGrid
from distconv.model.parallelize import parallelize, unparallelize
from distconv.planning.recorded_step import dtype_of, record_step
from distconv.planning.table import byte_size
from distconv.tensor.dist_tensor import DistTensor, distribute_tensor
from distconv.tensor.memory_format import in_sample_format
from distconv.tools.slabs import (
    GlobalNorms,
    ReceptiveField,
    Slab,
    Statistics,
    receptive_field,
    slabs_of,
)

Transform = Callable[[Tensor, Box], Tensor]

_MARGIN = 0.8
"""The fraction of the free memory that a forward pass may use."""


def infer(
    model: nn.Module,
    source: Any,
    sink: str | os.PathLike[str],
    grid: ProcessGrid,
    *,
    field: Field = None,
    transform: Transform | None = None,
    autocast: torch.dtype | None = None,
    argmax: bool = False,
    slabs: int | None = None,
    memory: int | None = None,
    overwrite: bool = False,
    restart: bool = False,
    progress: Callable[[str], object] = lambda text: None,
) -> Path:
    """Apply a network to each volume of a file, and write the results to another. Collective.

    Each rank reads its block of the volume and writes its block of the result. The result is that
    of the plain module on a device with enough memory, in evaluation mode and without gradients.
    The attributes of the source, such as the affine map and spacing of an image, are kept if the
    result has its spatial extents. The module is not changed.

    A volume that is too large for all ranks together is processed in slabs along its longest
    dimension. Slabs overlap by the receptive field of the network, so that results are the same;
    this is first checked on random numbers. Each instance or group norm takes a pass over the
    volume for its statistics, before the pass that writes. Finished slabs stay in `sink` with the
    suffix `.partial`, and another call with the same arguments continues with the next slab, also
    on a grid with other spatial axes, if `slabs` is given.

    Parameters
    ----------
    model: the network; takes (N, channels, *spatial), and returns one tensor with the same number
        of dimensions.
    source: as for `distconv.data.Dataset`: a path, a list of paths, an array, or a `Source`. A
        volume without a dimension of channels has one channel.
    sink: the file to write, in a format of `distconv.data.save`.
    grid: the process grid.
    field: the name of the array in files that hold several.
    transform: a function `transform(block, box)` of this rank's block of the input, which covers
        `box` of the batch; returns a block of the same shape, as `distconv.data.Normalize` does.
    autocast: the type for `torch.autocast` around the network, such as torch.bfloat16.
    argmax: whether to write the index of the largest channel instead of the channels, as uint8, or
        int32 for more than 256 channels.
    slabs: the number of slabs for each volume; by default the smallest number that fits in memory.
    memory: the bytes that each rank may use; by default most of the free memory.
    overwrite: whether an existing `sink` is replaced.
    restart: whether to discard the unfinished results of another run.
    progress: called with a line of text after each part of the work.

    Returns the path of the sink.

    Raises
    ------
    DataError
        On every rank, before anything is computed: for a source that cannot be read, or has not the
        channels of the network, a sink that exists, and a network that does not run on the grid, or
        in slabs where these are needed; the message names the layer.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> path = dc.data.save("scan.npy", dc.distribute_tensor(torch.ones(1, 1, 64, 48), grid))
    >>> net = nn.Conv2d(1, 2, 3, padding=1)
    >>> dc.infer(net, "scan.npy", "segmented.npy", grid, argmax=True).name
    'segmented.npy'
    >>> np.load("segmented.npy").shape
    (1, 1, 64, 48)
    """
    path = Path(sink)
    chosen = {"field": field, "autocast": autocast, "argmax": argmax, "slabs": slabs}
    chosen |= {"memory": memory, "sink": os.path.abspath(path), "overwrite": overwrite}
    check_alike(grid, {k: repr(v) for k, v in chosen.items()}, "Pass the same on every rank.")
    volume = together(grid, lambda: _opened(source, field))
    facts = together(grid, volume.facts)
    check_alike(grid, facts, "Pass the same data on all ranks.")
    together(grid, lambda: check_sink(path, overwrite))
    net = unparallelize(copy.deepcopy(model)).eval()
    shape = together(grid, lambda: _input_shape(net, volume, grid))
    task = _Task(shape, max(range(2, len(shape)), key=shape.__getitem__), dtype_of(net), autocast)
    recorded = together(grid, lambda: _record(net, task, grid))
    norms, free = GlobalNorms(), memory or _free_memory(grid)
    whole = Slab(0, shape[task.dim], 0, recorded.shape[task.dim], 0)
    division, reach = _Division([whole], 1, recorded.peak), None
    if slabs is None and recorded.peak > free or (slabs or 1) > 1:
        norms.replace_in(net, len(shape))
        reach = together(grid, lambda: receptive_field(net, shape, task.dim, task.dtype))
        together(grid, lambda: norms.measured(reach, task.dim))
        division = _divided(net, task, grid, norms, reach, recorded, free, slabs)
    passes = f", after {len(norms.found)} passes for the statistics of norms" if norms.found else ""
    progress(
        f"{volume.samples} volume(s) of {tuple(shape[1:])}, {len(division.slabs)} slab(s) each"
        f"{passes}: {byte_size(division.peak)} of memory on a rank, of {byte_size(free)}"
    )
    parallelize(net, grid)
    written = _written((volume.samples, *recorded.shape[1:]), recorded.dtype, argmax)
    run = _Run(net, grid, volume, task, transform, argmax, norms, division, *written, progress)
    if len(division.slabs) > 1 and reach is not None:
        run.check_slabs(reach)
    _write_all(run, path, facts, restart)
    return path


class _Task(NamedTuple):
    """The network's input, of global `shape`, the dimension of slabs, and autocast's type."""

    shape: tuple[int, ...]
    dim: int
    """The dimension along which volumes are processed in slabs."""
    dtype: torch.dtype
    autocast: torch.dtype | None


class _Division(NamedTuple):
    """The slabs of a volume, their requested number, and the peak bytes of a rank for a slab."""

    slabs: list[Slab]
    asked: int
    peak: int
    extents: Mapping[str, int] = {}
    """The extents of the norms' inputs along the dimension of slabs, by name, in the whole
    volume."""


class _Recorded(NamedTuple):
    """A dry run of the network: shape and type of its result, and a rank's peak bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    peak: int


def _written(
    shape: tuple[int, ...], dtype: torch.dtype, argmax: bool
) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and type to write for a result of the network of `shape` and `dtype`."""
    if argmax:
        return replaced_at(shape, 1, 1), torch.int32 if shape[1] > 256 else torch.uint8
    return shape, torch.float32 if dtype == torch.bfloat16 else dtype


def _opened(source: Any, field: Field) -> Source:
    found = open_sources(source, () if field is None else [field])
    if len(found) != 1:
        raise ValueError(f"infer: the source has the fields {list(found)}; choose one by field=")
    return next(iter(found.values()))


_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def _input_shape(net: nn.Module, volume: Source, grid: ProcessGrid) -> tuple[int, ...]:
    """Return the global shape of the network's input, with a volume for each rank along `sample`.

    Raises ValueError if the volumes do not have the dimensions of the network's convolutions.
    """
    found = {len(part.kernel_size) for part in net.modules() if isinstance(part, _CONVOLUTIONS)}
    shape, several = tuple(volume.shape), min(volume.samples, grid.shape["sample"])
    space = max(found, default=len(shape) - 1)
    if len(shape) not in (space, space + 1):
        raise ValueError(
            f"infer: {volume.name} has volumes of shape {shape}; the network has convolutions of "
            f"{space} dimensions, and expects (channels, *space) or space alone"
        )
    return (several, *(() if len(shape) == space + 1 else (1,)), *shape)


def _record(net: nn.Module, task: _Task, grid: ProcessGrid) -> _Recorded:
    """Return a dry run of the network on the grid; raise ValueError if the network does not run."""
    types: list[Any] = []
    hook = net.register_forward_hook(lambda module, given, y: types.append(y))
    how: Any = {"dtype": task.dtype, "autocast": task.autocast, "gpu": grid.computes_on_gpu}
    try:
        with torch.no_grad():
            found = record_step(net, [task.shape], grid.shape, loss=None, caller="infer", **how)
    finally:
        hook.remove()
    if found.refusal is not None:
        raise ValueError(f"infer: {found.calls[-1].name} is unsupported: {found.refusal}")
    y = types[-1]
    if not isinstance(y, Tensor) or y.dim() != len(task.shape):
        what = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(
            f"infer: the network returns {what} for an input of shape {task.shape}; expected one "
            "tensor (N, channels, *space). Wrap the network in a module that returns one tensor"
        )
    return _Recorded(tuple(y.shape), y.dtype, found.peak)


def _divided(
    net: nn.Module,
    task: _Task,
    grid: ProcessGrid,
    norms: GlobalNorms,
    reach: ReceptiveField,
    whole: _Recorded,
    free: int,
    slabs: int | None,
) -> _Division:
    """Return a volume in `slabs` slabs, or for None in the fewest slabs that fit. Collective.

    The number of slabs grows by a quarter, until a slab needs at most the `free` bytes of a rank.
    `reach` is the receptive field, and `whole` the dry run on the whole volume. Raises DataError if
    no number of slabs is enough.
    """
    shape, dim = task.shape, task.dim
    with norms.noting() as extents:
        together(grid, lambda: _record(net, task, grid))
    count = slabs or max(2, int(whole.peak / free) + 1)
    while True:
        cut = slabs_of(shape[dim], whole.shape[dim], reach, count)
        longest = max(slab.stop - slab.start for slab in cut)
        part = task._replace(shape=replaced_at(shape, dim, longest))
        needed = together(grid, partial(_record, net, part, grid)).peak
        if slabs is not None or needed <= free:
            return _Division(cut, count, needed, extents)
        if len(cut) < count or longest >= shape[dim]:
            raise DataError(
                f"infer: a slab of {longest} of {shape[dim]} elements needs {byte_size(needed)} on "
                f"a rank, more than the available {byte_size(free)}. Use more ranks (--grid), or "
                "fewer bytes (--autocast bfloat16)"
            )
        count += max(1, count // 4)


def _free_memory(grid: ProcessGrid) -> int:
    """Return the bytes that a forward pass may use on each rank, equal on all ranks. Collective."""
    if grid.device.type == "cpu":
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        with suppress(OSError, IndexError, ValueError):
            lines = Path("/proc/meminfo").read_text().splitlines()
            free = 1024 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1])
    else:
        free, _ = torch.get_device_module(grid.device).mem_get_info(grid.device)
    everyone = grid.all_gather_object((socket.gethostname(), str(grid.device), free))
    sharing = [(host, device) for host, device, _ in everyone]
    return int(_MARGIN * min(n / sharing.count((host, device)) for host, device, n in everyone))


@dataclass
class _Run:
    """The network on the grid, and its input: computes the output of any slab of any volumes."""

    net: nn.Module
    grid: ProcessGrid
    volume: Source
    task: _Task
    transform: Transform | None
    argmax: bool
    norms: GlobalNorms
    division: _Division
    shape: tuple[int, ...]
    """The global shape of the whole result."""
    dtype: torch.dtype
    """The type of the result."""
    progress: Callable[[str], object]

    def input(self, first: int, slab: Slab) -> DistTensor:
        """Return a slab's input for a batch that begins with volume number `first`. Collective."""
        count, *others = self.task.shape
        shape = (min(count, self.volume.samples - first), *others)
        shape = replaced_at(shape, self.task.dim, slab.stop - slab.start)
        cuts = default_cuts(len(shape), self.grid.topology)
        box = rank_box(shape, cuts, self.grid.topology, self.grid.rank)
        block = together(self.grid, lambda: self._read(first, slab, box))
        local = in_sample_format(block, shape, cuts, self.grid).to(self.grid.device)
        return DistTensor(local, shape, cuts, self.grid)

    def output(self, first: int, slab: Slab) -> DistTensor:
        """Return a slab's kept output for a batch that begins with volume `first`. Collective."""
        y = self.computed(self.input(first, slab), self.task.autocast)
        y = y.narrow(self.task.dim, slab.first, slab.last - slab.first)
        y = y.argmax(1, keepdim=True) if self.argmax else y
        return y.to(self.dtype)  # type: ignore[return-value]

    def computed(self, x: DistTensor, autocast: torch.dtype | None) -> Tensor:
        """Return the output of the network for `x`. Collective."""
        kind = self.grid.device.type
        with torch.no_grad(), torch.autocast(kind, autocast) if autocast else nullcontext():
            y: Tensor = self.net(x)
        return y

    def statistics(self, first: int, known: list[Statistics]) -> Iterator[list[Statistics]]:
        """Compute the statistics of the norms over the volumes from number `first` on. Collective.

        `known` are the statistics of the first norms, from an earlier run. Yields the list of the
        statistics so far after each further norm.
        """

        def compute(slab: Slab) -> None:
            self.computed(self.input(first, slab), self.task.autocast)

        extents, length = self.division.extents, self.task.shape[self.task.dim]
        for found in self.norms.gather(extents, length, self.division.asked, compute, known):
            known = [*known, found]
            self.progress(f"statistics of {len(known)} of {len(self.norms.found)} norms")
            yield known

    def _read(self, first: int, slab: Slab, box: Box) -> Tensor:
        """Return this rank's block `box` of a slab, converted and transformed."""
        dim, dtype = self.task.dim, self.task.dtype
        bare = len(self.volume.shape) == len(self.task.shape) - 2
        start, stop = (replaced_at(n, dim, n[dim] + slab.start) for n in (box.start, box.stop))
        stored = np.empty(box.shape, self.volume.dtype)
        inside = Box(start[1 + bare :], stop[1 + bare :])
        if box.size:
            for i, sample in enumerate(range(box.start[0], box.stop[0])):
                out = stored[i, 0] if bare else stored[i]
                self.volume.read_into(out, first + sample, inside)
        exact = np.float64 if dtype == torch.float64 else np.float32
        if stored.dtype.kind == "c":
            exact = np.complex128 if dtype == torch.complex128 else np.complex64  # type: ignore[assignment]
        block = torch.from_numpy(stored.astype(exact, copy=False)).to(dtype)
        if self.transform is not None:
            block = self.transform(block, Box(start, stop))
        return block

    def check_slabs(self, reach: ReceptiveField) -> None:
        """Raise DataError on every rank unless slabs of a small random volume are exact.

        Results differ if the network depends on the position or the size of its input, as
        interpolation with align_corners=True, circular padding and coordinates do. Collective.
        """
        shape, dim, dtype, _ = self.task
        period, edge = reach.stride, 2 * (reach.stride + reach.reach)
        length = min(2 * edge + 3 * period + shape[dim] % period, shape[dim])
        small = [min(n, edge + 4 * period + n % period) for n in shape]
        small[0], small[1], small[dim] = 1, shape[1], length
        numbers = torch.Generator().manual_seed(0)
        x = torch.randn(small, generator=numbers, dtype=dtype)

        def computed(slab: Slab) -> Tensor:
            part = x.narrow(dim, slab.start, slab.stop - slab.start)
            return self.computed(distribute_tensor(part, self.grid), None).full_tensor()  # type: ignore[attr-defined]

        self.norms.own()
        with self.norms.noting() as extents:
            whole = computed(Slab(0, length, 0, length, 0))
        cut = slabs_of(length, whole.shape[dim], reach, 3)
        list(self.norms.gather(extents, length, 3, computed))
        differences = []
        for slab in cut:
            kept = computed(slab).narrow(dim, slab.first, slab.last - slab.first)
            there = whole.narrow(dim, slab.place, slab.last - slab.first)
            differences.append((kept - there).abs().max())
        worst = torch.stack(differences).max().item()  # NaN if one of them is
        most = whole.abs().max().item()
        if not worst <= torch.finfo(dtype).eps ** 0.6 * most:
            raise DataError(
                f"infer: the outputs of a slab differ by {worst:.2g} from those of the whole, at "
                f"most {most:.2g}, on random numbers of shape {tuple(small)}. The network depends "
                "on the position or the size of its input, for example by interpolation with "
                "align_corners=True, circular padding or coordinates, so the volume cannot be "
                "processed in slabs. Use more ranks (--grid), or fewer bytes (--autocast bfloat16)"
            )


def _write_all(run: _Run, path: Path, facts: Mapping[str, str], restart: bool) -> None:
    """Compute and write the slabs of all volumes, from the first unfinished slab on. Collective."""
    grid, volume, kind = run.grid, run.volume, kind_to_write(path)
    array = together(grid, lambda: _described(run, kind))

    def create(unfinished: Path) -> dict[str, Any]:
        offset = create_file(unfinished, kind, {None: array}).get(None)
        return {"offset": offset, "chunks": array.chunks, "statistics": {}}

    task = {**facts, **_same_run(run, kind)}
    work = list(product(range(0, volume.samples, run.task.shape[0]), run.division.slabs))
    finish = partial(commit_file, path=path)
    with StepwiseFile(grid, path, task, create, finish, restart) as file:
        state = file.state
        if state["chunks"] is not None:
            array = replace(array, chunks=tuple(state["chunks"]))
        if state["finished"]:
            run.progress(f"{state['finished']} of {len(work)} slabs were finished before")
        of_volume = -1
        for number, (first, slab) in enumerate(work[state["finished"] :], state["finished"] + 1):
            if first != of_volume:
                of_volume = first
                for known in run.statistics(first, state["statistics"].get(str(first), [])):
                    file.keep(statistics={first: known})
            y = run.output(first, slab)
            start = replaced_at((first, *(0,) * (y.dim() - 1)), run.task.dim, slab.place)
            write_block(file.partial, path, None, y, array, state["offset"], start)
            del y
            file.keep(finished=number)
            run.progress(f"{number} of {len(work)} slabs are written")


def _described(run: _Run, kind: str) -> Description:
    """Return the description of the array to write: chunks within a slab, valid attributes."""
    attributes = dict(run.volume.attributes)
    if run.shape[2:] != run.task.shape[2:]:
        for name in ("affine", "spacing", "unit"):
            attributes.pop(name, None)
    longest = max(slab.last - slab.first for slab in run.division.slabs)
    of_slab = replaced_at(run.shape, run.task.dim, longest)
    given = default_cuts(len(run.shape), run.grid.topology), run.grid.topology, kind
    chunks = describe(None, of_slab, run.dtype, *given).chunks
    found = describe(None, run.shape, run.dtype, *given, chunks, attributes)
    return replace(found, coordinates=_coordinates(run.volume, run.shape))


def _same_run(run: _Run, kind: str) -> dict[str, str]:
    """Return the facts that must be equal for a run to continue the file of an earlier run."""
    return {
        "result": f"{run.shape} of {run.dtype}, {kind}",
        "slabs": f"{run.task.shape[0]} volumes at a time, {run.division.slabs}",
        "transform": code_of(run.transform),
        "options": f"autocast={run.task.autocast}, argmax={run.argmax}",
        "weights": _checksum(run.net),
    }


def _coordinates(volume: Source, shape: tuple[int, ...]) -> dict[int, Coordinate]:
    """Return the coordinates of the source along dimensions of a result (N, C, *spatial).

    Channels have no coordinates, and neither have dimensions with another extent than the source.
    """
    stored = (volume.samples, *volume.shape)
    moved = len(shape) - len(stored)
    places = {d: d + moved if d else 0 for d in volume.coordinates}
    return {
        place: volume.coordinates[d]
        for d, place in places.items()
        if place != 1 and shape[place] == stored[d]
    }


def _checksum(net: nn.Module) -> str:
    """Return a checksum of a network's parameters and buffers."""
    number = 0
    for name, x in net.state_dict().items():
        number = crc32(name.encode(), number)
        if isinstance(x, Tensor):
            content = x.detach().cpu().contiguous().flatten().view(torch.uint8)
            number = crc32(content.numpy().tobytes(), number)
        else:  # the extra state of a module
            number = crc32(repr(x).encode(), number)
    return f"{number:08x}"


def code_of(transform: Any) -> str:
    """Return a text that changes with the code of a function, or the attributes of an object."""
    code = getattr(transform, "__code__", None)
    if code is None:
        return "" if transform is None else f"{type(transform).__name__} {vars(transform)}"
    constants = [x for x in code.co_consts if not hasattr(x, "co_code")]
    return f"{crc32(code.co_code):08x} {constants} {code.co_names}"
