"""Writing NIfTI and TIFF files from all ranks, and files that are compressed once complete.

Both formats store an array contiguously, as `contiguous` does. A compressed file cannot be written
by boxes: it is written without compression first, and one rank compresses it.
"""

from __future__ import annotations

import gzip
import os
import shutil
import zipfile
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from distconv.data.sources.interface import import_package
from distconv.data.writing.contiguous import Description

_PIECE = 2**22
"""Bytes that are compressed at a time."""


def stored_order(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dimensions of an array (1, channels, *space) in the order of a file of this kind.

    NIfTI stores the first dimension of space closest. Raises ValueError for other shapes.
    """
    if len(shape) not in (4, 5) or shape[0] != 1:
        raise ValueError(
            f"the shape is {shape}; a file of this format holds one sample, (1, channels, height, "
            "width) or (1, channels, depth, height, width). Write .zarr or .h5, or a file for "
            "each sample"
        )
    space = tuple(range(2, len(shape)))
    return (0, 1, *(reversed(space) if kind == "nifti" else space))


def create_nifti(path: Path, array: Description) -> int:
    """Make a NIfTI file with room for an array; return the offset of the array, in bytes.

    Of the attributes, "affine" (or else "spacing") and "unit" are kept. Channels are the last
    dimension, as MONAI and nnU-Net have them; one channel has no dimension.
    """
    nibabel: Any = import_package("nibabel", f"{path}: writing it", "nifti")
    _, channels, *space = array.shape
    extents = tuple(space)
    if channels > 1:
        extents = (*space, *(1,) * (3 - len(space)), channels)
    given = array.attributes
    header = nibabel.Nifti2Header() if max(extents) > 2**15 - 1 else nibabel.Nifti1Header()
    try:
        header.set_data_dtype(array.dtype)
    except nibabel.spatialimages.HeaderDataError as error:
        raise ValueError(
            f"{path}: NIfTI has no {array.dtype}; convert the tensor, for example to uint8"
        ) from error
    header.set_data_shape(extents)
    spacing = given.get("spacing")
    if "affine" in given:
        affine = np.array(given["affine"], float)
        spacing = np.sqrt((affine[:3, : len(space)] ** 2).sum(0))
        header.set_sform(affine, code="scanner")
        header.set_qform(affine, code="scanner", strip_shears=True)
    if spacing is not None:
        header.set_zooms((*map(float, spacing), *(1.0,) * (len(extents) - len(space))))
    if given.get("unit") in ("mm", "meter", "micron"):
        header.set_xyzt_units(given["unit"])
    header["magic"] = header.single_magic
    offset = header.single_vox_offset
    header["vox_offset"] = offset
    with open(path, "xb") as file:
        file.write(header.binaryblock)
        file.truncate(offset + prod(array.shape) * array.dtype.itemsize)
    return int(offset)


def create_tiff(path: Path, array: Description) -> int:
    """Make an OME-TIFF file with room for an array; return the offset of the array, in bytes.

    Of the attributes "spacing" is kept. The file has pages without compression, one for each plane.
    """
    tifffile: Any = import_package("tifffile", f"{path}: writing it", "tiff")
    names = "CZYX" if len(array.shape) == 5 else "CYX"
    metadata: dict[str, Any] = {"axes": names}
    spacing = array.attributes.get("spacing", ())
    micrometres = {"mm": 1000.0, "meter": 1e6}.get(array.attributes.get("unit", ""), 1.0)
    for name, distance in zip(names[1:], spacing, strict=False):
        metadata[f"PhysicalSize{name}"] = distance * micrometres
    try:
        made = tifffile.memmap(
            path,
            shape=array.shape[1:],
            dtype=array.dtype,
            ome=True,
            bigtiff=True,
            photometric="minisblack",
            metadata=metadata,
        )
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{path}: TIFF has no {array.dtype}; convert the tensor, for example to uint8"
        ) from error
    offset: int = made.offset
    del made
    return offset


def compresses(path: Path) -> bool:
    """Return whether a file of this name is compressed, or packed, when it is complete."""
    return path.name.endswith((".nii.gz", ".npz"))


def compress(partial: Path, target: Path, path: Path, name: str) -> None:
    """Write the complete file `partial` to `target`, in the form that the suffix of `path` names.

    `name` is the name of the array in a `.npz` file.
    """
    if path.suffix == ".npz":
        with zipfile.ZipFile(target, "x", zipfile.ZIP_STORED) as archive:
            archive.write(partial, f"{name}.npy")
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        return
    with open(partial, "rb") as plain, open(target, "xb") as file:
        with gzip.GzipFile(path.stem, "wb", compresslevel=4, fileobj=file, mtime=0) as packed:
            shutil.copyfileobj(plain, packed, _PIECE)
        file.flush()
        os.fsync(file.fileno())
