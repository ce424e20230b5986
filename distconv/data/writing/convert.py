"""`convert`: copying samples of any format to chunked zarr arrays, on all ranks in parallel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import lcm, prod
from pathlib import Path
from typing import Any

import numpy as np

from distconv.data.durable import StepwiseFile, writing_to
from distconv.data.errors import check_alike, check_call, together
from distconv.data.sources.interface import Source
from distconv.data.sources.opening import facts_of, open_sources
from distconv.data.writing.formats import Description, create_zarr, default_chunks, write_chunks
from distconv.data.writing.save import check_sink, commit_file
from distconv.geometry.layout import Box, default_cuts
from distconv.geometry.topology import AXES, Topology
from distconv.grid.process_grid import ProcessGrid


def convert(
    source: Any,
    path: str | os.PathLike[str],
    grid: ProcessGrid,
    *,
    fields: Sequence[str | int] = (),
    chunks: Sequence[int] | None = None,
    readers: Mapping[str, int] | None = None,
    memory: int = 2**28,
    overwrite: bool = False,
    restart: bool = False,
    progress: Callable[[str], object] = lambda text: None,
) -> Path:
    """Copy samples of any format to a zarr folder, with other chunks. Collective.

    The arrays are split into pieces, boxes of complete chunks of the result. Each rank copies one
    piece at a time, and holds no more. The folder is renamed to `path` when it is complete.
    After an interruption, a call with the same arguments resumes, also on another number of ranks.

    Types, values and attributes are those of the source; scale and offset of packed values are
    applied.

    Parameters
    ----------
    source: as for `distconv.data.Dataset`: a path, a list of paths, an array, or a `Source`.
    path: the folder to write, with the suffix `.zarr`.
    grid: the process grid; only the number of ranks matters.
    fields: the names of the arrays to copy from a file that holds several. Without names the folder
        is a single array, else a group of arrays.
    chunks: the extents of a chunk, samples first. By default a chunk has at most 16 MiB of one
        sample, within the block of a rank of `readers`.
    readers: the axes of the grid that will read the samples, such as {"depth": 4}.
    memory: the largest size of a piece in bytes, if a chunk fits. Chunks of the source that
        intersect several pieces are read several times.
    overwrite: whether an existing folder is replaced.
    restart: whether to discard the pieces copied by an earlier run.
    progress: called with a line of text each time all ranks have copied a piece.

    Returns the path.

    Raises
    ------
    DataError
        On every rank: for a source that cannot be read, chunks that do not fit its shape, and a
        folder that exists.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> dc.data.on_rank_zero(grid, lambda: np.save("x.npy", np.ones((4, 1, 64, 64))))
    >>> path = dc.data.convert("x.npy", "x.zarr", grid, readers={"height": 4})
    >>> dc.data.Dataset(path, grid).fields[None].chunks
    (1, 1, 16, 64)
    """
    path = Path(path)
    chosen = {"fields": fields, "chunks": chunks, "readers": readers, "memory": memory}
    check_call("convert", grid, path, chosen | {"overwrite": overwrite, "restart": restart})
    sources = together(grid, lambda: open_sources(source, fields))
    task = together(grid, lambda: facts_of(sources))
    check_alike(grid, task, "Give all ranks the same data.")
    topology = Topology(tuple((readers or {}).get(axis, 1) for axis in AXES))

    def described() -> dict[str | None, Description]:
        unknown = sorted(set(readers or {}) - set(AXES))
        if unknown:
            raise ValueError(f"convert: readers= names {unknown}; the axes are {', '.join(AXES)}")
        if path.suffix != ".zarr":
            raise ValueError(f"convert: {path} is to be a zarr folder; give it the suffix .zarr")
        check_sink(path, overwrite)
        return {
            None if name is None else str(name): _description(own, chunks, topology)
            for name, own in sources.items()
        }

    arrays = together(grid, described)
    work = [
        (name, own, box)
        for (name, array), own in zip(arrays.items(), sources.values(), strict=True)
        for box in _pieces(array, own.chunks, memory)
    ]
    names = {name: own.name for name, own in zip(arrays, sources.values(), strict=True)}
    task |= {"arrays": f"{names}", "memory": str(memory)}
    task |= {"chunks": f"{[array.chunks for array in arrays.values()]}"}

    def create(unfinished: Path) -> dict[str, Any]:
        create_zarr(unfinished, arrays)
        return {}

    finish = partial(commit_file, path=path)
    with StepwiseFile(grid, path, task, create, finish, restart) as file:
        for first in range(file.state["finished"], len(work), grid.size):

            @writing_to(path)
            def copy(place: int = first + grid.rank) -> None:
                if place < len(work):
                    name, own, box = work[place]
                    write_chunks(file.partial, name, box, _values(own, box))

            together(grid, copy)
            file.keep(finished=min(first + grid.size, len(work)))
            progress(f"{file.state['finished']} of {len(work)} pieces are written")
    return path


def _description(own: Source, chunks: Sequence[int] | None, topology: Topology) -> Description:
    shape = (own.samples, *own.shape)
    if chunks is None:
        chunks = chunks_for_readers(own, topology)
    if len(chunks) != len(shape) or min(chunks) < 1:
        raise ValueError(
            f"convert: chunks={tuple(chunks)} of {own.name}, of shape {shape}; expected an extent "
            "from 1 for each dimension"
        )
    extents = tuple(min(int(c), n) for c, n in zip(chunks, shape, strict=True))
    return Description(shape, own.dtype, extents, attributes=own.attributes)


def chunks_for_readers(own: Source, topology: Topology) -> tuple[int, ...]:
    """Return the extents of chunks, samples first, within the blocks that ranks of a grid read.

    A chunk has at most 16 MiB. `own` is the source, and `topology` that of the reading grid.
    """
    # A sample with three dimensions, read by ranks along depth, is a volume without channels.
    bare = len(own.shape) == 3 and topology.extent("depth") > 1
    whole = (max(own.samples, topology.extent("sample")), *((1,) if bare else ()), *own.shape)
    cuts = default_cuts(len(whole), topology)
    found = default_chunks(whole, cuts, topology, own.dtype.itemsize)
    return (found[0], *found[1 + bare :])


def _pieces(array: Description, stored: tuple[int, ...] | None, memory: int) -> Iterator[Box]:
    """Yield boxes of complete chunks that cover an array, of at most `memory` bytes if possible.

    `stored` are the extents of the source's chunks, None without chunks. Boxes are enlarged first
    along dimensions in which the source's chunks are longest compared with the array's, so that
    most chunks of the source are read once.
    """
    chunks = array.chunks or array.shape
    stored = stored or array.shape
    extents, order = list(chunks), range(len(chunks))
    for d in sorted(order, key=lambda d: (stored[d] / chunks[d], d), reverse=True):
        fits = memory // (prod(extents) // extents[d] * array.dtype.itemsize)
        if fits >= array.shape[d]:
            extents[d] = array.shape[d]
            continue
        unit = lcm(stored[d], chunks[d])
        unit = unit if unit <= fits else chunks[d]
        extents[d] = max(fits // unit * unit, chunks[d])
    edges = [range(0, n, extent) for n, extent in zip(array.shape, extents, strict=True)]
    for start in product(*edges):
        stop = tuple(map(min, array.shape, map(sum, zip(start, extents, strict=True))))
        yield Box(start, stop)


def _values(own: Source, box: Box) -> Any:
    """Read and return the values of `box`, samples first, from a source."""
    values = np.empty(box.shape, own.dtype)
    inside = Box(box.start[1:], box.stop[1:])
    for place, sample in enumerate(range(box.start[0], box.stop[0])):
        own.read_into(values[place, ...], sample, inside)
    return values
