"""`save`: writing DistTensors to one file, each rank its own block."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distconv.data.durable import (
    check_no_url,
    fresh_name,
    move_into_place,
    remove,
    remove_partial,
    writing_to,
)
from distconv.data.errors import check_call, on_rank_zero, together
from distconv.data.sources.opening import KINDS, ZARR_FILES, kind_of
from distconv.data.writing import formats
from distconv.data.writing.formats import Description
from distconv.geometry.layout import Box, Cuts, rank_box, replicating_axes
from distconv.geometry.topology import Topology
from distconv.tensor.dist_tensor import DistTensor

_NAME = "data"
"""The name of the dataset in an HDF5 file that holds a single tensor without a name."""


def save(
    path: str | os.PathLike[str],
    tensors: DistTensor | Mapping[str, DistTensor],
    *,
    chunks: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a tensor to a file that `Dataset`, and any program, can read. Collective.

    Each rank writes its own block; of the ranks with replicas of a block, one writes. No elements
    are sent between ranks, and no rank holds more than its block. All ranks write to a temporary
    file, on a file system that all ranks see. When all bytes are on the disk, the file is renamed
    to `path` and replaces an earlier file. An earlier zarr folder is exchanged with the new one,
    or, where the system cannot do so, renamed first.

    Parameters
    ----------
    path: the file to write; the suffix selects the format:
        `.h5`, `.hdf5`: an HDF5 file with one contiguous dataset, "data", without compression. All
            ranks write at once; HDF5 needs no support of MPI.
        `.npy`: a NumPy file. All ranks write at once.
        `.zarr`: a compressed zarr array, of format 3. If blocks share chunks, ranks write in turns;
            otherwise all ranks write at once.
        `.nii`, `.tif`: a NIfTI or OME-TIFF file of one sample, (1, channels, *space), without
            compression. All ranks write at once.
        `.nii.gz`, `.npz`: like `.nii` and `.npy`; rank 0 then writes the file once more,
            compressed or in a zip file.
    tensors: a tensor, samples first; or several on one grid, in a dictionary by their names in an
        HDF5 file or zarr group.
    chunks: the extents of zarr's chunks, in a dictionary for several tensors. By default a chunk
        has at most 16 MiB of one sample, within the block of a rank if possible.
    attributes: the attributes of each array, such as `source.attributes` of the input. NIfTI
        keeps "affine", "spacing" and "unit"; TIFF keeps "spacing"; HDF5 and zarr keep all; NumPy
        keeps none.

    Returns the path.

    Raises
    ------
    DataError
        On every rank, if a rank cannot write, or the suffix or the type of values is not
        supported. An earlier file at `path` remains.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> x = dc.distribute_tensor(torch.ones(2, 1, 9, 8), grid)
    >>> path = dc.data.save("result.npy", x)  # every rank writes its own block
    >>> np.load(path).shape
    (2, 1, 9, 8)
    """
    path, named = Path(path), _named(tensors)
    grid = next(iter(named.values())).grid
    shapes = {"the tensors": [(name, tuple(x.shape), x.dtype, x.cuts) for name, x in named.items()]}
    check_call("save", grid, path, shapes | {"chunks": chunks, "attributes": attributes})
    kind = together(grid, lambda: _kind(path, named))
    arrays = together(grid, lambda: _described(named, kind, chunks, attributes or {}))
    partial = Path(on_rank_zero(grid, lambda: _unfinished(path, kind)))
    try:
        _write(partial, path, kind, named, arrays)
    except BaseException:
        # Raise the original error, even if the unfinished file cannot be removed.
        with suppress(OSError):
            if grid.rank == 0:
                remove(partial)
        raise
    return path


def _named(tensors: DistTensor | Mapping[str, DistTensor]) -> Mapping[Any, DistTensor]:
    """Return the tensors by name; a single tensor has the name None.

    Raises TypeError for values that are not DistTensors, ValueError for an empty dictionary.
    """
    named: Mapping[Any, Any] = tensors if isinstance(tensors, Mapping) else {None: tensors}
    for x in named.values():
        if not isinstance(x, DistTensor):
            raise TypeError(
                "save: expected a DistTensor, or a dictionary of DistTensors by name, not "
                f"{type(x).__name__}; write plain tensors with numpy.save, for example"
            )
    if not named:
        raise ValueError("save: there are no tensors in the dictionary")
    return named


def _described(
    named: Mapping[Any, DistTensor], kind: str, chunks: Any, attributes: Mapping[str, Any]
) -> dict[Any, Description]:
    """Describe for each tensor by name the array to write in a file of format `kind`.

    `chunks` and `attributes` are the arguments of `save`.
    """
    found = {}
    for name, x in named.items():
        by_name = isinstance(chunks, Mapping) and name is not None
        chosen = chunks.get(name) if by_name else chunks
        given = tuple(x.shape), x.dtype, x.cuts, x.grid.topology
        found[name] = describe(name, *given, kind, chosen, attributes)
    return found


def _unfinished(path: Path, kind: str) -> str:
    """Return the temporary name of the file that will replace `path`.

    Creates the folder of the file, and removes unfinished files of killed writers. Called on rank
    0. `kind` is the format, such as "zarr".
    """
    with writing_to(path):
        _check_place(path, kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            remove_partial(path.parent, re.escape(path.name))
        return str(fresh_name(path))


def _write(
    partial: Path,
    path: Path,
    kind: str,
    named: Mapping[Any, DistTensor],
    arrays: Mapping[Any, Description],
) -> None:
    """Write tensors to the temporary file `partial`, and rename the file to `path`. Collective.

    `arrays` are the descriptions of the tensors `named`, by the same names.
    """
    grid = next(iter(named.values())).grid

    @writing_to(path)
    def create() -> dict[Any, int]:
        return create_file(partial, kind, arrays)

    @writing_to(path)
    def commit() -> None:
        commit_file(partial, path, next(iter(named)))
        remove_partial(path.parent, re.escape(path.name))

    offsets = on_rank_zero(grid, create)
    for name, x in named.items():
        write_block(partial, path, name, x, arrays[name], offsets.get(name))
    on_rank_zero(grid, commit)


def kind_to_write(path: Path) -> str:
    """Return the format for the suffix of `path`, such as "hdf5".

    Raises ValueError for a suffix that cannot be written, and for a URL.
    """
    check_no_url(path)
    kind = "hdf5" if path.suffix == ".nc" else kind_of(path)
    if kind in (None, "dicom", "shard") or path.suffix == ".zip":
        known = [s for s in (*KINDS, ".nc") if s not in (".dcm", ".tar", ".zarr.zip")]
        raise ValueError(
            f"{path}: its suffix {path.suffix!r} is not supported for writing; expected one of "
            f"{', '.join(known)}"
        )
    return kind


def check_sink(path: Path, overwrite: bool) -> None:
    """Raise `OSError` if a file cannot be created at `path`, `ValueError` for an unknown suffix.

    An existing file is an error unless `overwrite`.
    """
    kind = kind_to_write(path)
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} exists; choose another name, or overwrite=True (--overwrite)"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    _check_place(path, kind)


def _kind(path: Path, named: Mapping[Any, DistTensor]) -> str:
    """Return the format of the file `path`; raise ValueError if it cannot hold the tensors."""
    kind = kind_to_write(path)
    if kind not in ("hdf5", "zarr") and None not in named:
        raise ValueError(
            f"{path} holds one array without a name; save {list(named)} to .h5 or .zarr"
        )
    grids = {id(x.grid): str(x.grid) for x in named.values()}
    if len(grids) > 1 and len({x.grid for x in named.values()}) > 1:
        raise ValueError(f"{path}: the tensors are on different grids; save a file for each grid")
    return kind


def describe(
    name: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    cuts: Cuts,
    topology: Topology,
    kind: str,
    chunks: Any = None,
    attributes: Mapping[str, Any] = MappingProxyType({}),
) -> Description:
    """Return the description of the array that stores a tensor of global shape `shape`.

    `name` is the tensor's name in the file; `kind` is the format, such as "zarr"; `chunks` are the
    extents of a chunk, None for the default. Raises ValueError for a tensor that the format cannot
    hold, and for invalid `chunks`.
    """
    label = "the tensor" if name is None else f"{name!r}"
    if not isinstance(name, str | None) or (name is not None and (not name or "/" in name)):
        raise ValueError(
            f"save: {name!r} is not a valid name of a tensor; use a string without slashes"
        )
    if not prod(shape) or not shape:
        raise ValueError(f"save: {label} of shape {shape} holds no samples")
    try:
        stored = torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError as error:
        raise ValueError(
            f"save: {label} has type {dtype}, which NumPy does not support; save x.float()"
        ) from error
    if kind != "zarr":
        if chunks is not None:
            raise ValueError(f"save: chunks={tuple(chunks)} apply to .zarr only; leave them out")
        order = formats.stored_order(kind, shape) if kind in ("nifti", "tiff") else None
        return Description(shape, stored, order=order, attributes=attributes)
    if chunks is None:
        chunks = formats.default_chunks(shape, cuts, topology, stored.itemsize)
    extents = tuple(map(int, chunks))
    if len(extents) != len(shape) or min(extents) < 1:
        raise ValueError(
            f"save: chunks={extents} of {label} of shape {shape}; expected an extent of 1 or more "
            "for each dimension, or a dictionary of such extents by name"
        )
    return Description(shape, stored, extents, attributes=attributes)


def _check_place(path: Path, kind: str) -> None:
    """Raise `OSError` if `path` is a folder, or for zarr anything but a zarr or an empty folder.

    `kind` is the format to be written, such as "zarr".
    """
    if kind != "zarr" and path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, which would be replaced; choose another name")
    if kind == "zarr" and path.exists():
        zarr = any((path / name).is_file() for name in ZARR_FILES)
        if not path.is_dir() or (any(path.iterdir()) and not zarr):
            raise FileExistsError(f"{path} is not a zarr folder; choose another name, or remove it")


def create_file(partial: Path, kind: str, arrays: Mapping[Any, Description]) -> dict[Any, int]:
    """Create the file or folder `partial` with room for all arrays.

    Returns the offset of each array in the file, in bytes, by name; {} for zarr. `kind` is the
    format, such as "zarr".
    """
    if kind == "zarr":
        formats.create_zarr(partial, arrays)
        return {}
    if kind != "hdf5":
        create = {"nifti": formats.create_nifti, "tiff": formats.create_tiff}
        return {None: create.get(kind, formats.create_npy)(partial, arrays[None])}
    offsets = formats.create_hdf5(partial, {name or _NAME: a for name, a in arrays.items()})
    return {name: offsets[name or _NAME] for name in arrays}


def commit_file(partial: Path, path: Path, name: str | None = None) -> None:
    """Rename the complete file or zarr folder `partial` to `path`, and flush the names to the disk.

    A file with the suffix `.nii.gz` or `.npz` is first compressed or packed. `name` is the name of
    the first array in the file.
    """
    if partial.is_dir():
        formats.sync_tree(partial)
    if formats.compresses(path):
        packed = fresh_name(path)
        try:
            formats.compress(partial, packed, path, name or _NAME)
            move_into_place(packed, path)
        finally:
            remove(packed)
        remove(partial)
        return
    move_into_place(partial, path)


def write_block(
    partial: Path,
    path: Path,
    name: str | None,
    x: DistTensor,
    array: Description,
    offset: int | None,
    start: tuple[int, ...] | None = None,
) -> None:
    """Write this rank's block of a tensor to a file or zarr folder. Collective.

    Of the ranks with replicas of a block, one writes the block. Ranks that share a chunk of a zarr
    array write in turns. Raises DataError on every rank if any rank cannot write.

    Parameters
    ----------
    partial: the temporary file or folder.
    path: the final name, for error messages.
    name: the tensor's name in the file; None for a tensor without a name.
    x: the tensor.
    array: the array in the file, which has at least the extents of the tensor.
    offset: the offset of the array in the file, in bytes; None for zarr.
    start: the index of the tensor's first element in the array; by default 0 in each dimension.
    """
    grid, topology = x.grid, x.grid.topology
    shape, start = tuple(x.shape), start or (0,) * len(array.shape)
    own = rank_box(shape, x.cuts, topology, grid.rank)
    low, high = (tuple(a + b for a, b in zip(n, start, strict=True)) for n in (own.start, own.stop))
    box = Box(low, high)
    replica = any(grid.coords[axis] for axis in replicating_axes(x.cuts, topology))
    counts = (1,) * len(array.shape)
    if array.chunks is not None:
        counts = formats.turns(shape, x.cuts, topology, array.chunks, start)
    mine = formats.turn_of(grid.rank, x.cuts, topology, counts)
    for turn in range(prod(counts)):

        @writing_to(path)
        def write(turn: int = turn) -> None:
            if replica or not box.size or turn != mine:
                return
            if offset is None:
                formats.write_chunks(partial, name, box, _values(x))
                return
            order = array.order or tuple(range(len(shape)))
            extents, low, high = (
                tuple(n[d] for d in order) for n in (array.shape, box.start, box.stop)
            )
            values = np.ascontiguousarray(_values(x).transpose(order))
            formats.write_box(partial, offset, extents, Box(low, high), values)

        together(grid, write)


def _values(x: DistTensor) -> NDArray[Any]:
    """Return this rank's block as a contiguous numpy array."""
    own = x.shard.detach().resolve_conj().resolve_neg().cpu()
    return np.ascontiguousarray(own.numpy())
