"""Opening of the samples passed to `Dataset`: a path, pattern, array, dataset, or dictionary."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias
from weakref import finalize

from distconv.data.sources.arrays import ArraySource, open_npy, open_npz, open_zarr, open_zarr_url
from distconv.data.sources.files import FilesSource, ShardSource
from distconv.data.sources.functions import Items, ItemSource
from distconv.data.sources.hdf5 import HDF5Source
from distconv.data.sources.interface import Source, import_package
from distconv.data.sources.volumes import is_dicom, open_dicom, open_nifti, open_tiff, stack_of

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A glob pattern, a folder, or a list of paths."""

Field: TypeAlias = str | int | None
"""The name of a field: a dataset of a file or an index into items; None for a single field."""

KINDS = {
    **{".h5": "hdf5", ".hdf5": "hdf5", ".he5": "hdf5", ".npy": "npy", ".npz": "npz"},
    **{".zarr": "zarr", ".zarr.zip": "zarr", ".nii": "nifti", ".nii.gz": "nifti"},
    **{".tif": "tiff", ".tiff": "tiff", ".dcm": "dicom", ".tar": "shard"},
}
"""The kinds of files by suffix."""

_ONE_SAMPLE = ("nifti", "tiff", "dicom")
"""Kinds of image files, which hold a single array without a name."""

_NETCDF = ".nc"
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
"""The first bytes of an HDF5 file."""

_PATTERN = frozenset("*?[")
ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")


def open_sources(source: Any, fields: Sequence[str | int] = ()) -> dict[Field, Source]:
    """Open and return the sources of `fields`, by name in this order; of all fields by default.

    `source` is the argument of `distconv.data.Dataset`. Raises OSError, ValueError or TypeError if
    `source` cannot be opened or lacks a field.
    """
    if isinstance(source, Mapping):
        missing = [field for field in fields if field not in source]
        if missing:
            raise ValueError(f"there is no source for {missing}; choose from {list(source)}")
        return {f: _of_object(source[f], None, str(f)) for f in fields or source}
    if not isinstance(source, Source) and _is_torch_dataset(source):
        items = Items(source)
        return {f: ItemSource(items, f) for f in fields or items.fields()}
    if not fields:
        return {None: _of_object(source, None, "the array")}
    return {f: _of_object(source, f, str(f)) for f in fields}


def facts_of(sources: Mapping[Field, Source]) -> dict[str, str]:
    """Return facts about the sources of all fields by name, for ranks to compare.

    The name of a fact includes the field, as files of several fields may have the same name.
    """
    return {
        fact if field is None else f"{fact}, field {field!r}": value
        for field, source in sources.items()
        for fact, value in source.facts().items()
    }


def open_files(pattern: str | os.PathLike[str], field: Field, stacked: bool = False) -> Source:
    """Return a source on all files that a pattern matches, in the order of their names.

    Parameters
    ----------
    pattern: a glob pattern such as "train/*.h5"; `**` matches nested folders.
    field: the dataset in each file, for files that have datasets.
    stacked: whether each file holds samples along its first dimension; otherwise a file is one
        sample.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> for i in range(3):
    ...     path = dc.data.save(f"{i}.npy", dc.distribute_tensor(torch.full((1, 8, 8), i), grid))
    >>> source = dc.data.open_files("*.npy", field=None)
    >>> source.samples, source.shape
    (3, (1, 8, 8))
    """
    return _files(_matching(pattern), field, stacked)


def open_stack(files: Paths, field: Field = None) -> Source:
    """Return a source that stacks the planes in files, in order, to one sample (..., Z, Y, X).

    Parameters
    ----------
    files: a glob pattern such as "scan/*.tif", a folder, or a list of paths. The files of a pattern
        or folder are stacked in the order of their names; DICOM files by the planes' positions.
    field: the dataset in each file, for files that have datasets.

    Raises FileNotFoundError if there is no file, and ValueError for files that differ in shape or
    type.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> for z in range(3):
    ...     path = dc.data.save(f"plane{z}.npy", dc.distribute_tensor(torch.ones(8, 8), grid))
    >>> source = dc.data.open_stack("plane*.npy")
    >>> source.samples, source.shape
    (1, (3, 8, 8))
    """
    paths = _listed(files)
    if all(map(is_dicom, paths)):
        return open_dicom(paths)
    return stack_of(paths, partial(of_path, field=field, single=True), {})


def _listed(files: Paths) -> list[Path]:
    """Return the paths of files given by a pattern, a folder, or a list of paths.

    Raises FileNotFoundError if no file matches a pattern.
    """
    if not isinstance(files, str | os.PathLike):
        return [Path(path) for path in files]
    path = Path(files)
    return sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else _matching(files)


def _matching(pattern: str | os.PathLike[str]) -> list[Path]:
    paths = [Path(found) for found in sorted(glob.glob(str(pattern), recursive=True))]
    if not paths:
        raise FileNotFoundError(f"{pattern}: no file matches")
    return paths


def _files(paths: Sequence[Path], field: Field, stacked: bool = False) -> Source:
    """Return a source on files, each one sample unless `stacked`; a DICOM series is one sample."""
    if not stacked and all(map(is_dicom, paths)):
        return open_dicom(paths)
    stacked = stacked or all(kind_of(path) == "shard" for path in paths)
    return FilesSource(paths, partial(of_path, field=field, single=not stacked), stacked)


def kind_of(path: Path) -> str | None:
    """Return the kind of a file by its suffix, such as "hdf5"; None for an unknown suffix."""
    name = path.name.lower()
    return next((KINDS[s] for s in sorted(KINDS, key=len, reverse=True) if name.endswith(s)), None)


def _of_object(source: Any, field: Field, name: str) -> Source:
    """Open and return one field of `source`: a path, pattern, URL, list, array or `Source`.

    `name` is the name of an array, for error messages. Raises TypeError for other objects, and for
    a field of an array or `Source`.
    """
    if isinstance(source, str | os.PathLike):
        text = os.fspath(source)
        if "://" in text:
            return _of_url(text, field if field is None else str(field))
        path = Path(text)
        if _PATTERN & set(text) and not path.exists():
            return open_files(text, field)
        if path.is_dir() and not _is_zarr(path):
            inside = sorted(p for p in path.iterdir() if p.is_file())
            if inside and all(map(is_dicom, inside)):
                return open_dicom(inside)
            return open_files(_only_kind_in(path), field)
        return of_path(path, field)
    if _are_paths(source):
        return _files([Path(path) for path in source], field)
    if field is not None:
        raise TypeError(
            f"{type(source).__name__} has no fields, but inputs or targets name {field!r}; pass "
            f"{{{field!r}: ...}}, a source for each name"
        )
    if isinstance(source, Source):
        return source
    if hasattr(source, "shape") and hasattr(source, "dtype") and hasattr(source, "__getitem__"):
        return ArraySource(source, name)
    raise TypeError(
        f"a source of samples cannot be {source!r}; expected a path, a pattern, an array, a torch "
        "dataset, a distconv.data.Source, or a dictionary of these by name"
    )


def _of_url(url: str, field: str | None) -> Source:
    """Return a source on an object in an object store, at a URL of fsspec.

    Boxes of zarr and HDF5 are read from the store. Files of other kinds need a copy on the node,
    which a URL such as "simplecache::s3://bucket/x.nii.gz" creates.
    """
    path = Path(url.rstrip("/").rpartition("/")[2])
    if path.suffix == ".zarr":
        return open_zarr_url(url, field)
    fsspec = import_package("fsspec", f"{url}: reading an object store", "remote")
    cache, chained, _ = url.partition("::")
    by_boxes = kind_of(path) == "hdf5" or path.suffix == _NETCDF
    if not chained and not by_boxes:
        raise ValueError(
            f"{url}: of object stores only zarr and HDF5 (NetCDF 4) are read by boxes; write "
            f"simplecache::{url} to copy the file to the node first"
        )
    # A separate folder per URL: objects in different remote folders may have the same name.
    folder = TemporaryDirectory(prefix="distconv-") if chained else None
    try:
        if folder is None:
            file = fsspec.open(url, "rb").open()
        else:
            options = {cache: {"same_names": True, "cache_storage": folder.name}}
            found = fsspec.open_local(url, **options)  # a list for a pattern
            paths = list(map(Path, found if isinstance(found, list) else [found]))
    except ImportError as error:
        raise ImportError(f"{url}: {error}") from error
    except ValueError as error:  # a chain, such as zip://, that makes no copy on the node
        raise ValueError(f"{url}: {error}; write simplecache::{url} to copy the file") from error
    except OSError as error:
        raise OSError(f"{url}: cannot be opened: {error!r}") from error
    if folder is None:
        return HDF5Source(path, field, file=file)
    source = of_path(paths[0], field) if len(paths) == 1 else _files(paths, field)
    finalize(source, folder.cleanup)
    return source


def of_path(path: Path, field: Field = None, single: bool = False) -> Source:
    """Return a source on one file or folder; `single` if an array in a file is one sample.

    Raises OSError, ValueError or TypeError if `path` cannot be opened or has no field `field`.
    """
    kind = "zarr" if _is_zarr(path) else kind_of(path)
    if path.is_dir() and kind != "zarr":
        return _of_object(path, field, path.name)
    if kind is None and path.is_file():
        kind = _kind_by_content(path)
    if field is not None and not isinstance(field, str):
        raise TypeError(f"{path}: {field!r} is not the name of a dataset; expected a string")
    if kind == "hdf5":
        return HDF5Source(path, field, single)
    if kind == "zarr":
        return open_zarr(path, field, single)
    if kind == "shard":
        return ShardSource(path, field)
    if kind == "npz":
        return open_npz(path, field, single)
    if kind == "npy" or kind in _ONE_SAMPLE:
        if field is not None:
            raise ValueError(
                f"{path} holds one array without a name, but inputs or targets name {field!r}; "
                f"pass {{{field!r}: {path.name!r}}}, a file for each name"
            )
        if kind == "nifti":
            return open_nifti(path)
        if kind == "tiff":
            return open_tiff(path)
        return open_dicom([path]) if kind == "dicom" else open_npy(path, single)
    raise ValueError(
        f"{path}: its suffix {path.suffix!r} is not supported; expected one of "
        f"{', '.join(KINDS)}, an HDF5 or NetCDF file of any suffix, or pass a source, such as "
        "distconv.data.HDF5Source(path, name)"
    )


def _kind_by_content(path: Path) -> str | None:
    """Return the kind of a file with an unknown suffix from its first bytes; None if unknown.

    NetCDF files of version 4, among others, are HDF5 files. Raises ValueError for NetCDF files of
    earlier versions.
    """
    with open(path, "rb") as file:
        first = file.read(len(_SIGNATURE))
    if first[:3] == b"CDF":
        raise ValueError(
            f"{path} is a NetCDF file of version 3, which is not supported; convert it, for "
            f"example by nccopy -k nc4 {path.name} new{_NETCDF}"
        )
    return "hdf5" if first == _SIGNATURE else "dicom" if is_dicom(path) else None


def _are_paths(source: Any) -> bool:
    """Return whether `source` is a list or tuple of paths that is not empty."""
    several = isinstance(source, list | tuple) and len(source) > 0
    return several and all(isinstance(path, str | os.PathLike) for path in source)


def _is_zarr(path: Path) -> bool:
    return path.suffix == ".zarr" or any((path / name).is_file() for name in ZARR_FILES)


def _only_kind_in(folder: Path) -> str:
    """Return a glob pattern, such as "folder/*.h5", of the supported files in a folder.

    Raises ValueError if there are no supported files, or if their suffixes differ.
    """
    known = sorted((*KINDS, _NETCDF), key=len, reverse=True)
    names = [path.name for path in folder.iterdir()]
    suffixes = sorted({next((s for s in known if name.endswith(s)), "") for name in names} - {""})
    if len(suffixes) != 1:
        raise ValueError(
            f"{folder} holds {'files of ' + ', '.join(suffixes) if suffixes else 'no samples'}; "
            f"name the files by a pattern, for example {folder}/*.h5"
        )
    return f"{glob.escape(str(folder))}/*{suffixes[0]}"


def _is_torch_dataset(source: Any) -> bool:
    return (
        hasattr(source, "__len__")
        and hasattr(source, "__getitem__")
        and not isinstance(source, str)
        and not _are_paths(source)
        and not hasattr(source, "dtype")
    )
