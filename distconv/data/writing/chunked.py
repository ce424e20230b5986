"""Writing zarr arrays from all ranks: those that share a chunk take turns."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from distconv.data.durable import sync, sync_folder, unseen
from distconv.data.sources.interface import import_package
from distconv.data.writing.contiguous import Description
from distconv.geometry.layout import Box, Cuts, block, owning_part
from distconv.geometry.topology import Topology

_LARGEST = 2**24
"""The largest number of bytes of a chunk by default."""


def default_chunks(
    shape: tuple[int, ...], cuts: Cuts, topology: Topology, itemsize: int
) -> tuple[int, ...]:
    """Return chunks of one sample and at most 16 MiB each, within a rank's box where possible."""
    chunks = [block(n, topology.parts(axes), 0)[1] for n, axes in zip(shape, cuts, strict=True)]
    chunks[0] = 1
    while prod(chunks) * itemsize > _LARGEST:
        longest = chunks.index(max(chunks))
        divisor = next((f for f in (2, 3, 5, 7) if chunks[longest] % f == 0), 2)
        chunks[longest] = -(-chunks[longest] // divisor)
    return tuple(chunks)


def turns(
    shape: tuple[int, ...],
    cuts: Cuts,
    topology: Topology,
    chunks: tuple[int, ...],
    start: tuple[int, ...],
) -> tuple[int, ...]:
    """Return for each dimension the number of turns in which the blocks along it are written.

    The blocks are those of a tensor of `shape`, which begins at `start` in the array.

    Blocks whose numbers are equal modulo the number of turns share no chunk, and are written in one
    turn. One turn is enough if all blocks begin at the start of a chunk.
    """
    return tuple(
        _turns_along(n, topology.parts(axes), chunk, first)
        for n, axes, chunk, first in zip(shape, cuts, chunks, start, strict=True)
    )


def turn_of(rank: int, cuts: Cuts, topology: Topology, turns: tuple[int, ...]) -> int:
    """Return the turn, from 0, in which a rank writes its box.

    `turns` is the number of turns of each dimension, from the function `turns`.
    """
    coordinates = topology.coordinates(rank)
    turn = 0
    for axes, count in zip(cuts, turns, strict=True):
        turn = turn * count + topology.part(coordinates, axes) % count
    return turn


def create_zarr(path: Path, arrays: Mapping[str | None, Description]) -> None:
    """Make a zarr folder of format 3: one array if its name is None, else a group of arrays."""
    zarr = _zarr(path)
    group = None if None in arrays else zarr.open_group(str(path), mode="w-")
    for name, array in arrays.items():
        kind = {"shape": array.shape, "dtype": array.dtype, "chunks": array.chunks}
        kind["attributes"] = dict(array.attributes)
        if group is None:
            zarr.create_array(str(path), **kind)
        else:
            group.create_array(name, **kind)
    sync_tree(path)


def write_chunks(path: Path, name: str | None, box: Box, values: NDArray[Any]) -> None:
    """Write a box of an array in a zarr folder, and bring its chunks to the disk.

    `name` is the array's name in the folder; None if the folder is the array. Not collective. A
    chunk that the box covers in part is read and written again, so nobody else may write to it at
    the same time.
    """
    if not path.exists():
        raise unseen(path)
    array = _zarr(path).open_array(str(path), path=name, mode="r+")
    folder = path if name is None else path / name
    along = (
        [(i, max(start, i * n), min(stop, (i + 1) * n)) for i in range(start // n, -(-stop // n))]
        for start, stop, n in zip(box.start, box.stop, array.chunks, strict=True)
    )
    for runs in product(*along):
        place, low, high = zip(*runs, strict=True)
        part = Box(low, high)
        # One at a time: if one of several chunks fails, zarr writes the others in the background.
        array[part.slices] = values[part.slices_within(box)]
        chunk = folder / array.metadata.encode_chunk_key(place)
        if chunk.exists():  # not where all values are the array's fill value
            sync(chunk)


def sync_tree(path: Path) -> None:
    """Bring to the disk the names of all files in a zarr folder, and the .json files at its top."""
    for folder in (path, *(found for found in path.rglob("*") if found.is_dir())):
        sync_folder(folder)
    for found in path.glob("*.json"):
        sync(found)


def _turns_along(size: int, parts: int, chunk: int, first: int) -> int:
    most = 1
    for part in range(min(parts, size)):
        _, stop = block(size, parts, part)
        end = min(-(-(first + stop) // chunk) * chunk - first, size)
        most = max(most, owning_part(size, parts, end - 1) - part + 1)
    return most


def _zarr(path: Path) -> Any:
    zarr = import_package("zarr", f"{path}: writing zarr", "data")
    if not hasattr(zarr, "create_array"):
        raise ImportError(
            f"{path}: writing zarr needs zarr 3, but zarr {zarr.__version__} is installed; pip "
            "install 'zarr>=3'"
        )
    return zarr
