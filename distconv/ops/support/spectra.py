"""Partial Fourier transforms: spectra with few modes, by products with small matrices.

A Fourier neural operator transforms a field, keeps a few of its modes, and transforms back a
spectrum that is zero in all other modes. In the forward transform each rank multiplies its own
block by the columns of the Fourier matrix for the kept modes. Only the sums over the ranks are
sent, which are as small as the kept modes. In the inverse transform each rank gathers the kept
modes and computes its own block.

Both spectra are pending tensors: their elements are computed in full only if other functions read
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from distconv.device.kinds import remembered
from distconv.geometry.layout import Cuts, cutting_axes
from distconv.grid.interface import Grid
from distconv.grid.words import module_calls
from distconv.ops.support.operands import box_on_rank
from distconv.tensor.base import DistTensorBase, PendingElements, Run, ViewRecipe
from distconv.tensor.dispatch import is_traced, is_traced_zeros
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import redistribute, reduce_scatter
from distconv.torch_private import autocast_is_on, count_modes

FEW = 1.0
"""The largest ratio of numbers in the kept modes to numbers in a rank's block of the field. Above
this ratio, a full transform sends less."""

MOST_ALONG = 48
"""The most modes along the last dimension. With 48 of 192 modes, products take as long as fast
transforms and their messages between two ranks on one machine (`python -m benchmarks modes`)."""

_TYPES = {torch.float32, torch.float64, torch.complex64, torch.complex128}


class FourierTransform(NamedTuple):
    """A Fourier transform of several dimensions, such as `torch.fft.rfftn`.

    Attributes
    ----------
    kind: "fft", "rfft", "ifft" or "irfft".
    name: the function that the user called, for the records of redistributions.
    lengths: for each transformed dimension, in torch's order, the number of positions in space.
    norm: torch's name of the normalisation, or None.
    """

    kind: str
    name: str
    lengths: dict[int, int]
    norm: str | None

    @property
    def scale(self) -> float:
        """Return the factor by which `norm` multiplies the sums of the transform."""
        count, inverse = prod(self.lengths.values()), self.kind.startswith("i")
        if self.norm == "ortho":
            return count**-0.5
        return 1 / count if inverse != (self.norm == "forward") else 1.0


@remembered
def _waves(
    device: torch.device,
    length: int,
    frequencies: tuple[int, ...],
    start: int,
    stop: int,
    sign: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return exp(sign 2 pi i f j / length), with a row for each position j and a column for each f.

    The positions are `start` to `stop` - 1; the numbers f are `frequencies`.
    """
    positions = torch.arange(start, stop, device=device).unsqueeze(1)
    steps = positions * torch.tensor(frequencies, dtype=torch.int64, device=device) % length
    angles = steps.double() * (sign * 2 * torch.pi / length)
    return torch.polar(torch.ones_like(angles), angles).to(dtype)


def _to_modes(y: Tensor, d: int, length: int, frequencies: tuple[int, ...], start: int) -> Tensor:
    """Return this rank's contribution to the modes of `frequencies` along dimension `d`.

    `y` is this rank's block of the field, whose first position along `d` is `start`; `length` is
    the number of positions to transform. Positions beyond `length` do not count. The sum of the
    contributions of the ranks along `d` gives the modes.
    """
    y = y.narrow(d, 0, min(max(length - start, 0), y.shape[d])).movedim(d, -1)
    stop, dtype = start + y.shape[-1], y.dtype.to_complex()
    waves = _waves(y.device, length, frequencies, start, stop, -1, dtype)
    if y.is_complex():
        return (y @ waves).movedim(-1, d)
    pairs = y @ torch.view_as_real(waves).flatten(1)
    return torch.view_as_complex(pairs.unflatten(-1, (-1, 2))).movedim(-1, d)


def _to_space(
    y: Tensor, d: int, length: int, frequencies: tuple[int, ...], start: int, stop: int, real: bool
) -> Tensor:
    """Return the inverse transform of the modes `y` along `d`, at positions `start` to `stop` - 1.

    `y` has the modes of `frequencies` along dimension `d`; `length` is the number of positions. If
    `real`, the result is real, and the conjugate modes at negative frequencies are not in `y`.
    """
    waves = _waves(y.device, length, frequencies, start, stop, 1, y.dtype)
    y = y.movedim(d, -1)
    if not real:
        return (y @ waves.mT).movedim(-1, d)
    # A pair of conjugate modes adds twice the real part of one; mode 0 and the last are single.
    weights = [1.0 if f == 0 or 2 * f == length else 2.0 for f in frequencies]
    doubled = waves.conj() * torch.tensor(weights, dtype=waves.dtype.to_real(), device=y.device)
    matrix = torch.view_as_real(doubled.resolve_conj()).flatten(1).mT
    return (torch.view_as_real(y.resolve_conj()).flatten(-2) @ matrix).movedim(-1, d)


@contextmanager
def _in_full_precision(device: torch.device) -> Iterator[None]:
    """Switch autocast off within this context: autocast would multiply in half precision."""
    off = autocast_is_on() and device.type != "meta"
    with torch.autocast(device.type, enabled=False) if off else nullcontext():
        yield


def _are_few(
    slices: Iterable[Sequence[int]], field: Iterable[int], complex: bool, parts: int
) -> bool:
    """Return whether the kept modes are few enough to compute with matrix products.

    `slices` has, for each slice of kept modes, the number of modes along each transformed
    dimension. `field` has the sizes of these dimensions, which are partitioned in `parts`;
    `complex` states that the field is complex.
    """
    slices = list(slices)
    count = (1 if complex else 2) * sum(map(prod, slices))
    return 0 < count * parts <= FEW * prod(field) and max(s[-1] for s in slices) <= MOST_ALONG


class Spectrum(PendingElements):
    """The Fourier transform of a partitioned field, computed when it is read.

    A slice of few modes is computed without the other modes.
    """

    def __init__(
        self,
        x: DistTensor,
        transform: FourierTransform,
        in_full: Callable[[DistTensor], DistTensor],
    ) -> None:
        self._transform, self._memory = transform, x._memory
        self._source = ViewRecipe.now(
            DistTensor(x.shard, x.shape, x.cuts, x.grid), in_full, None
        )._replace(
            recorded=torch.is_grad_enabled() and x.shard.requires_grad, modules=module_calls()
        )
        self._writes = None if x.shard.is_inference() else x.shard._version
        self._memory.note_reader(self)
        self._shifts: dict[int, int] = {}
        self._along_first: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        """The modes along the dimension that is transformed first, the last of the field, by
        dimension and frequencies. Several slices use them."""

    @property
    def requires_grad(self) -> bool:
        """Return whether the modes require gradients once they are computed."""
        return self._source.recorded

    def block(self) -> Tensor:
        """Transform the field in full, and return this rank's block of the modes. Collective."""
        field = self._field()
        with _in_full_precision(field.shard.device), self._source.as_when_made():
            made: Any = self._source.make(field)
            if self._shifts:
                made = torch.roll(made, list(self._shifts.values()), list(self._shifts))
            return cast(Tensor, made.shard)

    def part(self, x: DistTensor, index: tuple[Any, ...], runs: Sequence[Run]) -> Any:
        """Return the slice `x[index]` of the spectrum `x`, computed by matrix products. Collective.

        Returns None if the slice has too many modes. `runs` has the first position, step and number
        of positions of each item of `index`.
        """
        transform, field = self._transform, self._field()
        grid, cuts, lengths = field.grid, field.cuts, transform.lengths
        wanted = [runs[d][2] for d in lengths]
        axes = cutting_axes(cuts[d] for d in lengths)
        sizes = (field.shape[d] for d in lengths)
        if not _are_few([wanted], sizes, field.dtype.is_complex, grid.topology.parts(axes)):
            return None
        frequencies: dict[int, tuple[int, ...]] = {}
        for d in lengths:
            first, step, n = runs[d]
            shift, size = self._shifts.get(d, 0), x.shape[d]
            frequencies[d] = tuple((first + i * step - shift) % size for i in range(n))
        with _in_full_precision(field.shard.device), self._source.as_when_made():
            partial = self._project(field, frequencies) * transform.scale
            shape = tuple(len(frequencies.get(d, range(n))) for d, n in enumerate(field.shape))
            apart = tuple(() if d in lengths else a for d, a in enumerate(cuts))
            block = reduce_scatter(partial, shape, apart, cuts, grid, transform.name)
        block = block if torch.is_grad_enabled() else block.detach()
        kept: Any = DistTensor(block, shape, cuts, grid)
        rest = list(index)
        for d in lengths:  # these dimensions have the picked frequencies alone
            rest[d] = 0 if isinstance(index[d], int) else slice(None)
        return kept if all(pick == slice(None) for pick in rest) else kept[tuple(rest)]

    def rolled(self, x: DistTensor, shifts: Mapping[int, int]) -> Any:
        """Return the spectrum `x` rolled by `shifts`, by dimension, without computing it.

        Returns None if `shifts` has a dimension that is not transformed.
        """
        if not self._transform.lengths.keys() >= shifts.keys():
            return None
        other = Spectrum.__new__(Spectrum)
        other.__dict__.update(self.__dict__)
        other._memory.note_reader(other)
        other._shifts = _summed(self._shifts, shifts)
        return other.tensor(x.shape, x.cuts, x.example)

    def tensor(self, shape: Sequence[int], cuts: Cuts, example: Tensor) -> DistTensor:
        """Return a DistTensor of global `shape` whose elements, the modes, are computed when read.

        `cuts` are the grid axes that partition each dimension; `example` is a plain tensor of the
        type and device of the modes.
        """
        return DistTensor.with_pending(self, shape, cuts, self._source.base.grid, example)

    def keep_source(self) -> None:
        """Copy this rank's block of the field, which will be overwritten. No communication."""
        field = self._source.base
        with self._source.as_when_made():
            block = field.shard.clone()
        self._source = self._source._replace(
            base=DistTensor(block, field.shape, field.cuts, field.grid)
        )
        self._writes = None if block.is_inference() else block._version

    def _field(self) -> DistTensorBase:
        """Return the field; raise RuntimeError if its block was written to after the transform."""
        field = self._source.base
        if self._writes is not None and field.shard._version != self._writes:
            raise RuntimeError(
                f"{self._transform.name}: the block of its input of shape {tuple(field.shape)} was "
                "written to, as a plain tensor, before the transform was read; pass x.clone()"
            )
        return field

    def _project(self, field: DistTensorBase, frequencies: dict[int, tuple[int, ...]]) -> Tensor:
        """Return this rank's contribution to the modes at `frequencies`, given by dimension."""
        y, start = field.shard, field.box.start
        # The last dimension in torch's order comes first, as its input may be real.
        for place, d in enumerate(reversed(frequencies)):
            key = d, frequencies[d]
            if place or key not in self._along_first:
                y = _to_modes(y, d, self._transform.lengths[d], frequencies[d], start[d])
                if not place:
                    self._along_first[key] = y
            else:
                y = self._along_first[key]
        return y


class _Kept(NamedTuple):
    """A slice of assigned modes: its index, its positions along each dimension, and the modes."""

    picks: tuple[slice, ...]
    positions: tuple[range, ...]
    value: DistTensor


class AssignedSpectrum(PendingElements):
    """A spectrum, computed when read, that is zero except in slices that the program assigned."""

    def __init__(self, shape: Sequence[int], cuts: Cuts, grid: Grid, example: Tensor) -> None:
        self._shape, self._cuts, self._grid = tuple(shape), cuts, grid
        self._example, self._inference = example, torch.is_inference_mode_enabled()
        self._kept: list[_Kept] = []
        self._shifts: dict[int, int] = {}

    @property
    def requires_grad(self) -> bool:
        """Return whether an assigned slice requires gradients."""
        return any(kept.value.requires_grad for kept in self._kept)

    def block(self) -> Tensor:
        """Return this rank's block of the spectrum, zeros included. Collective."""
        own = box_on_rank(self._shape, self._cuts, self._grid).shape
        with torch.inference_mode(self._inference), torch.enable_grad():
            made: Any = DistTensor(
                self._example.new_zeros(own), self._shape, self._cuts, self._grid
            )
            for kept in self._kept:
                made[kept.picks] = kept.value
            if self._shifts:
                made = torch.roll(made, list(self._shifts.values()), list(self._shifts))
            return cast(Tensor, made.shard)

    def assign(
        self, x: DistTensor, index: tuple[Any, ...], runs: Sequence[Run], value: Any
    ) -> bool:
        """Keep `value` as the slice `x[index]` of the spectrum `x`, and return True. Collective.

        Returns False, without effect, if the slice overlaps an earlier one, if the spectrum was
        rolled, or if `value` is not a complex DistTensor of the slice's shape. `runs` has the first
        position, step and number of positions of each slice in `index`.
        """
        sliced = all(isinstance(pick, slice) for pick in index)
        sizes = tuple(n for _, _, n in runs)
        if self._shifts or not sliced or not isinstance(value, DistTensor):
            return False
        if tuple(value.shape) != sizes or not value.is_complex() or value.grid != self._grid:
            return False
        positions = tuple(range(a, a + n * step, step) for a, step, n in runs)
        for other in self._kept:
            pairs = zip(positions, other.positions, strict=True)
            if all(not set(a).isdisjoint(b) for a, b in pairs):
                return False
        # A copy, as the program may write to the value later.
        self._kept.append(_Kept(index, positions, value.to(x.dtype).clone()))  # type: ignore[arg-type]
        x.sync_requires_grad()
        return True

    def rolled(self, x: DistTensor, shifts: Mapping[int, int]) -> Any:
        """Return the spectrum rolled by `shifts`, by dimension, without computing it."""
        other = AssignedSpectrum(self._shape, self._cuts, self._grid, self._example)
        other._kept, other._shifts = [*self._kept], _summed(self._shifts, shifts)
        return other.tensor()

    def tensor(self) -> DistTensor:
        """Return a DistTensor whose elements, this spectrum, are computed when they are read."""
        return DistTensor.with_pending(self, self._shape, self._cuts, self._grid, self._example)

    def to_space(self, transform: FourierTransform, cuts: Cuts) -> DistTensor | None:
        """Return the inverse transform of the spectrum, partitioned by `cuts`. Collective.

        Returns None if the assigned modes are too many for matrix products, or do not extend over
        all other dimensions.
        """
        lengths, grid = transform.lengths, self._grid
        real = transform.kind == "irfft"
        axes = cutting_axes(cuts[d] for d in lengths)
        full = all(
            len(p) == n
            for kept in self._kept
            for d, (p, n) in enumerate(zip(kept.positions, self._shape, strict=True))
            if d not in lengths
        )
        slices = [[len(kept.positions[d]) for d in lengths] for kept in self._kept]
        few = _are_few(slices, lengths.values(), not real, grid.topology.parts(axes))
        if not (full and few) or not lengths.keys() >= self._shifts.keys():
            return None
        shape = tuple(lengths.get(d, n) for d, n in enumerate(self._shape))
        apart = tuple(() if d in lengths else a for d, a in enumerate(cuts))
        box = box_on_rank(shape, cuts, grid)
        sums: dict[Any, Tensor] = {}
        for kept in self._kept:
            y = redistribute(kept.value, apart, transform.name).shard * transform.scale
            rows: list[tuple[int, ...]] = []
            for d, n in lengths.items():
                most = n // 2 + 1 if real and d == next(reversed(lengths)) else n
                shift, size = self._shifts.get(d, 0), self._shape[d]
                modes = [(p + shift) % size for p in kept.positions[d]]
                inside = [i for i, f in enumerate(modes) if f < most]
                if len(inside) < len(modes):
                    y = y.index_select(d, torch.tensor(inside, device=y.device))
                rows.append(tuple(modes[i] for i in inside))
            sums[tuple(rows)] = sums[tuple(rows)] + y if tuple(rows) in sums else y
        with _in_full_precision(self._example.device):
            for d, n in lengths.items():
                found: dict[Any, Tensor] = {}
                for (own, *others), y in sums.items():
                    last = real and not others
                    y = _to_space(y, d, n, own, box.start[d], box.stop[d], last)
                    rest = tuple(others)
                    found[rest] = found[rest] + y if rest in found else y
                sums = found
        (block,) = sums.values()
        return DistTensor(block, shape, cuts, grid)


def zeros(shape: Sequence[int], cuts: Cuts, grid: Grid, example: Tensor) -> DistTensor:
    """Return zeros of the type of `example`, partitioned by `cuts`.

    A partitioned complex tensor is a spectrum that takes no memory until it is read.
    """
    if example.dtype in _TYPES and example.is_complex() and cutting_axes(cuts):
        return AssignedSpectrum(shape, cuts, grid, example.new_empty(0)).tensor()
    own = box_on_rank(shape, cuts, grid).shape
    return DistTensor(example.new_zeros(own), shape, cuts, grid)


def is_fresh_spectrum(plain: Tensor) -> bool:
    """Return whether a plain tensor is complex and all zeros, as a new spectrum is.

    A tensor without elements, in a dry run, counts as zeros if nothing has been written to it.
    While the program is traced to be replayed, only zeros that the program makes count. Returns
    False while another mode of torch's dispatcher is active, because such a mode would record that
    elements are read.
    """
    if plain.dtype not in _TYPES or not plain.is_complex() or plain.requires_grad:
        return False
    if not plain.numel() or not (plain.is_inference() or plain._version == 0):
        return False
    if is_traced():
        return is_traced_zeros(plain)
    return plain.is_meta or not (count_modes() or plain.any())


def can_be_partial(x: DistTensor, transform: FourierTransform) -> bool:
    """Return whether the result of `transform` of `x` may be computed when it is read.

    This requires a forward transform along a partitioned dimension.
    """
    return (
        transform.kind in ("fft", "rfft")
        and x.dtype in _TYPES
        and x.numel() > 0
        and bool(cutting_axes(x.cuts[d] for d in transform.lengths))
    )


def _summed(shifts: Mapping[int, int], more: Mapping[int, int]) -> dict[int, int]:
    return {d: shifts.get(d, 0) + more.get(d, 0) for d in {**shifts, **more}}
