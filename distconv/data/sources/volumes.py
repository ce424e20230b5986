"""Sources on image files with known dimensions: NIfTI, TIFF, DICOM, and stacks of planes.

A sample has the shape (channels, *space), also if the file has no dimension of channels. A stack
has a dimension of channels only if its planes have one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distconv.data.sources.arrays import ArraySource, check_file, unwritten_check
from distconv.data.sources.files import FilesSource
from distconv.data.sources.interface import Array, Source, import_package, reading
from distconv.geometry.layout import Box


class _Arranged:
    """An array (samples, channels, *space) over an array whose dimensions have another order.

    Parameters
    ----------
    stored: an array with `shape`, `dtype`, and indexing by slices.
    order: for each dimension, the dimension of `stored`; None for a dimension of extent 1 that
        `stored` lacks.
    chunks: the extents, in the order of `stored`, of chunks that are always read in full; None if
        any box can be read without other elements.
    attributes: as in `Source.attributes`.
    """

    def __init__(
        self,
        stored: Any,
        order: Sequence[int | None],
        chunks: Sequence[int] | None,
        attributes: Mapping[str, Any],
    ) -> None:
        self._stored, self._order = stored, order
        self.shape = tuple(1 if d is None else int(stored.shape[d]) for d in order)
        self.dtype, self.attrs = stored.dtype, attributes
        self.chunks = chunks and tuple(1 if d is None else int(chunks[d]) for d in order)

    def __getitem__(self, index: tuple[int | slice, ...]) -> Array:
        # A stored dimension that is not in the order has extent 1.
        stored: list[int | slice] = [0] * len(self._stored.shape)
        for at, d in zip(index, self._order, strict=True):
            if d is not None:
                stored[d] = at
        values = np.asarray(self._stored[tuple(stored)])
        kept = [d for d in range(len(stored)) if isinstance(stored[d], slice)]
        sliced = [d for at, d in zip(index, self._order, strict=True) if isinstance(at, slice)]
        values = values.transpose([kept.index(d) for d in sliced if d is not None])
        for place, d in enumerate(sliced):
            if d is None:
                values = np.expand_dims(values, place)
        return values


def open_nifti(path: Path) -> ArraySource:
    """Return a source on a NIfTI file: one sample (channels, X, Y[, Z]), in the order of the file.

    The slope and intercept of the file are applied to values read. A box of a `.nii` file is read
    without other elements; a `.nii.gz` file is decompressed from its beginning for any box.

    A dimension beyond space is that of the channels. Raises OSError for a file that is missing or
    damaged, and ValueError for several dimensions beyond space.
    """
    nibabel = import_package("nibabel", f"{path}: reading it", "nifti")
    check_file(path, "a .nii file")
    with reading(path, "NIfTI file", Exception):
        image = nibabel.load(path)
    shape = image.shape
    named = [d for d in range(3, len(shape)) if shape[d] > 1]
    if len(named) > 1 or len(shape) < 2:
        raise ValueError(
            f"{path} has the shape {shape}; expected two or three spatial dimensions, and at most "
            "one of channels"
        )
    # A 2-D image with channels has a third dimension of extent 1 before the channels.
    space = 2 if len(shape) == 2 or (shape[2] == 1 and len(shape) > 3) else 3
    attributes = {
        "affine": np.asarray(image.affine, float).tolist(),
        "spacing": [float(n) for n in image.header.get_zooms()[:space]],
        "unit": str(image.header.get_xyzt_units()[0]),
    }
    chunks = shape if path.name.endswith(".gz") else None
    order = None, named[0] if named else None, *range(space)
    array = _Arranged(image.dataobj, order, chunks, attributes)
    return ArraySource(array, path.name, check=unwritten_check(path), path=path)


def open_tiff(path: Path) -> ArraySource:
    """Return a source on a TIFF or OME-TIFF file: samples (channels, [Z], Y, X).

    The first series of the file is read, at full resolution. Frames of a time series are samples;
    a dimension without a known name is Z. Boxes of contiguous files are read without other
    elements; tiles or pages of other files are read in full.

    Raises OSError for a file that is missing or damaged, and ValueError for other dimensions.
    """
    tifffile = import_package("tifffile", f"{path}: reading it", "tiff")
    check_file(path, "a .tif file")
    with reading(path, "TIFF file", Exception):
        file = tifffile.TiffFile(path)
        series = file.series[0]
        axes, shape = str(series.axes), tuple(series.shape)
        spacing = _spacing_of_tiff(tifffile, file)
    found = {name: d for d, name in enumerate(axes) if shape[d] > 1 or name in "ZYX"}
    others = [name for name in found if name not in "TCSZYX"]
    if len(others) == 1 and "Z" not in found:
        found["Z"] = found.pop(others.pop())
    channels = [found[name] for name in "CS" if name in found]
    if others or len(channels) > 1 or not {"Y", "X"} <= set(found):
        raise ValueError(
            f"{path} has the dimensions {axes} of extents {shape}; expected Y and X, and at most "
            "Z, channels and time"
        )
    channel = channels[0] if channels else None
    order = found.get("T"), channel, *(found[n] for n in "ZYX" if n in found)
    attributes: dict[str, Any] = {}
    if spacing:
        attributes = {"spacing": [spacing[n] for n in "ZYX" if n in found], "unit": "micron"}
    stored, chunks = _pixels(series, path)
    array = _Arranged(stored, order, chunks, attributes)
    return ArraySource(array, path.name, check=unwritten_check(path), path=path)


def _pixels(series: Any, path: Path) -> tuple[Any, tuple[int, ...] | None]:
    """Return the array of a TIFF series, and the extents of its tiles or pages if read in full."""
    if series.dataoffset is not None:
        dtype = np.dtype(series.dtype).newbyteorder(series.parent.byteorder)
        series.parent.close()  # the memory map opens the file itself
        return np.memmap(path, dtype, "r", series.dataoffset, tuple(series.shape)), None
    zarr = import_package("zarr", f"{path}: reading it", "tiff")
    array = zarr.open(series.aszarr(level=0), mode="r")
    return array, array.chunks


def _spacing_of_tiff(tifffile: Any, file: Any) -> dict[str, float] | None:
    """Return the distance of pixels in Z, Y and X, in micrometres, from OME metadata, or None."""
    if not file.ome_metadata:
        return None
    images = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]
    pixels = (images[0] if isinstance(images, list) else images)["Pixels"]
    known = {n: pixels.get(f"PhysicalSize{n}") for n in "ZYX"}
    if known["X"] is None or any(pixels.get(f"PhysicalSize{n}Unit", "µm") != "µm" for n in "ZYX"):
        return None
    return {n: 1.0 if size is None else float(size) for n, size in known.items()}


class StackSource(Source):
    """A source that stacks planes (..., Y, X) along a new dimension to one sample (..., Z, Y, X).

    Raises ValueError for planes with fewer than two dimensions.

    Parameters
    ----------
    planes: a source with one plane (..., Y, X) per sample, in the order of Z.
    name: the name of the stack.
    attributes: as in `Source.attributes`.
    """

    def __init__(self, planes: Source, name: str, attributes: Mapping[str, Any]) -> None:
        if len(planes.shape) < 2:
            raise ValueError(f"{planes.name} has the shape {planes.shape}; expected planes (Y, X)")
        self._planes, self._axis = planes, len(planes.shape) - 2
        self.name, self.samples, self.dtype = name, 1, planes.dtype
        self.shape = (*planes.shape[:-2], planes.samples, *planes.shape[-2:])
        pieces = (1, *planes.shape) if planes.chunks is None else planes.chunks
        self.chunks = None
        if planes.chunks is not None:
            self.chunks = (1, *pieces[1:-2], 1, *pieces[-2:])
        self.attributes = dict(attributes)

    def read_into(self, out: Array, sample: int, box: Box) -> None:
        axis = self._axis
        start, stop = (n[:axis] + n[axis + 1 :] for n in (box.start, box.stop))
        for place, plane in enumerate(range(box.start[axis], box.stop[axis])):
            self._planes.read_into(np.moveaxis(out, axis, 0)[place], plane, Box(start, stop))

    def facts(self) -> dict[str, str]:
        """Return facts about the stack and its files by name, for ranks to compare."""
        return super().facts() | self._planes.facts()


def stack_of(
    paths: Sequence[Path], open_plane: Callable[[Path], Source], attributes: Mapping[str, Any]
) -> Source:
    """Return a source that stacks the planes in the files `paths`, in order, to one sample."""
    planes = FilesSource(paths, open_plane)
    return StackSource(planes, f"{paths[0].name} and {len(paths) - 1} more planes", attributes)


def is_dicom(path: Path) -> bool:
    """Return whether a file has the signature of DICOM files, in bytes 128 to 131."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(132)[128:] == b"DICM"


def open_dicom(paths: Sequence[Path]) -> Source:
    """Return a source on the files of a DICOM series: one sample (1, Z, Y, X), read plane by plane.

    The planes are ordered by their positions along the normal of the first plane. Slopes and
    intercepts are applied.

    Raises ValueError for several series, planes of several orientations or at unequal distances,
    colours, and files of several frames.
    """
    pydicom = import_package("pydicom", f"{paths[0]}: reading it", "dicom")
    headers = [_header(pydicom, path) for path in paths]
    several = sorted({str(header.get("SeriesInstanceUID")) for header in headers})
    if len(several) > 1:
        raise ValueError(
            f"{paths[0].parent} holds {len(several)} series: {', '.join(several)}; pass a list "
            "with the files of one series"
        )
    if len(headers) == 1 or "ImageOrientationPatient" not in headers[0]:
        ordered = sorted(range(len(paths)), key=lambda i: int(headers[i].get("InstanceNumber", i)))
        attributes: dict[str, Any] = {}
    else:
        ordered, attributes = _geometry(paths, headers)
    scaled = any(_scale(header) != (1.0, 0.0) for header in headers)

    def open_plane(path: Path) -> Source:
        return _DicomPlane(pydicom, path, scaled)

    return stack_of([paths[i] for i in ordered], open_plane, attributes)


class _DicomPlane(Source):
    """A source on one file of a DICOM series: one sample (1, Y, X), always read in full.

    `scaled` converts values to float64 with the slope and intercept of the file.
    """

    samples = 1

    def __init__(self, pydicom: Any, path: Path, scaled: bool) -> None:
        header = _header(pydicom, path)
        if int(header.get("NumberOfFrames", 1)) > 1 or int(header.get("SamplesPerPixel", 1)) > 1:
            raise ValueError(
                f"{path} holds several frames, or colours; expected one plane of numbers. Convert "
                "it, for example by dcm2niix"
            )
        self._pydicom, self._path, self._scaled = pydicom, path, scaled
        self.name, self.shape = path.name, (1, int(header.Rows), int(header.Columns))
        self.chunks = (1, *self.shape)
        signed = "i" if int(header.PixelRepresentation) else "u"
        self.dtype = np.dtype(f"{signed}{int(header.BitsAllocated) // 8}")
        if scaled:
            self.dtype = np.dtype(np.float64)

    def read_into(self, out: Array, sample: int, box: Box) -> None:
        with reading(self._path, "DICOM file", Exception):
            plane = self._pydicom.dcmread(self._path)
            values = plane.pixel_array[box.slices[1:]]
        slope, intercept = _scale(plane)
        out[0] = values * slope + intercept if self._scaled else values


def _header(pydicom: Any, path: Path) -> Any:
    check_file(path, "a DICOM file")
    with reading(path, "DICOM file", Exception):
        return pydicom.dcmread(path, stop_before_pixels=True)


def _scale(header: Any) -> tuple[float, float]:
    return float(header.get("RescaleSlope", 1)), float(header.get("RescaleIntercept", 0))


def _geometry(paths: Sequence[Path], headers: Sequence[Any]) -> tuple[list[int], dict[str, Any]]:
    """Return the indices of the planes of a DICOM series in order, and the attributes of the stack.

    The attributes are "affine", "spacing" and "unit". The affine matrix maps indices (Z, Y, X) to
    millimetres towards right, anterior and superior, as in NIfTI. Raises ValueError for planes of
    several orientations or at unequal distances.
    """
    directions = np.array([h.ImageOrientationPatient for h in headers], float)
    if not np.allclose(directions, directions[0], atol=1e-4):
        raise ValueError(
            f"{paths[0].parent} holds planes of several orientations; pass the planes of one "
            "orientation"
        )
    row, column = directions[0][:3], directions[0][3:]
    normal = np.cross(row, column)
    positions = np.array([h.ImagePositionPatient for h in headers], float)
    along = positions @ normal
    ordered = np.argsort(along, kind="stable").tolist()
    first, last = positions[ordered[0]], positions[ordered[-1]]
    steps = np.diff(along[ordered])
    if (steps < 1e-6).any() or np.ptp(steps) > 0.01 * steps.mean():
        raise ValueError(
            f"{paths[0].parent} holds planes at distances from {steps.min():.4g} to "
            f"{steps.max():.4g} mm; expected equal distances and each plane once"
        )
    down, right = map(float, headers[0].PixelSpacing)
    affine = np.eye(4)
    between = (last - first) / (len(paths) - 1)
    affine[:3] = np.stack([between, column * down, row * right, first], 1)
    affine[:2] *= -1  # DICOM counts towards left and posterior
    spacing = [float(np.linalg.norm(between)), down, right]
    return ordered, {"affine": affine.tolist(), "spacing": spacing, "unit": "mm"}
