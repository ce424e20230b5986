"""Volumes in the formats of scanners, microscopes and models are read by boxes, as they are."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distconv as dc
from distconv.data import Dataset, HDF5Source, open_stack
from distconv.data.sources.opening import open_sources
from distconv.geometry.layout import Box
from tests.support.everywhere import WORLD, fails_everywhere, on_rank_zero

every_size = pytest.mark.parallel([1, 2, 4])
both = pytest.mark.parallel([1, 2])

pytestmark = pytest.mark.filterwarnings("ignore:.*is stored in chunks")

X = np.arange(2 * 5 * 6 * 7, dtype=np.int16).reshape(2, 5, 6, 7)
"""Channels and a volume of integers; `X[:1]` is a volume alone."""

AFFINE = np.array([[0, 0, 2, 5], [0, 3, 0, -4], [-1.5, 0, 0, 7], [0, 0, 0, 1]], float)


def nifti(path: Path, x: np.ndarray, slope: float | None = None) -> None:
    """Write channels and a volume as MONAI and nnU-Net do, channels last."""
    nibabel = pytest.importorskip("nibabel")
    stored = x.transpose(1, 2, 3, 0) if len(x) > 1 else x[0]
    image = nibabel.Nifti1Image(stored, AFFINE)
    image.header.set_xyzt_units("mm")
    if slope is None:
        nibabel.save(image, path)
        return
    # nibabel would choose a slope of its own.
    image.header.set_slope_inter(slope, 1)
    image.header["vox_offset"] = 352
    path.write_bytes(image.header.binaryblock + bytes(4) + stored.tobytes("F"))


def tiff(path: Path, x: np.ndarray, **options: Any) -> None:
    """Write an OME-TIFF file of channels and a volume."""
    tifffile = pytest.importorskip("tifffile")
    sizes = {"PhysicalSizeZ": 3.0, "PhysicalSizeY": 2.0, "PhysicalSizeX": 0.5}
    metadata = {"axes": "CZYX", **sizes}
    tifffile.imwrite(path, x, ome=True, metadata=metadata, **options)


def dicom(folder: Path, x: np.ndarray, slope: float = 1, **other: Any) -> None:
    """Write the planes of a volume as the files of a DICOM series, in no order."""
    pydicom = pytest.importorskip("pydicom")
    folder.mkdir()
    for z, plane in enumerate(x):
        meta = pydicom.dataset.FileMetaDataset()
        meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        meta.MediaStorageSOPClassUID = pydicom.uid.CTImageStorage
        meta.MediaStorageSOPInstanceUID = f"1.2.3.{z + 1}"
        header = pydicom.Dataset()
        header.file_meta = meta
        header.SOPClassUID, header.SOPInstanceUID = pydicom.uid.CTImageStorage, f"1.2.3.{z + 1}"
        header.SeriesInstanceUID = "1.2.3"
        header.Rows, header.Columns = plane.shape
        header.SamplesPerPixel, header.PhotometricInterpretation = 1, "MONOCHROME2"
        header.BitsAllocated = header.BitsStored = 16
        header.HighBit, header.PixelRepresentation = 15, 1
        header.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
        header.ImagePositionPatient = [10, 20, 2.5 * z]
        header.PixelSpacing = [0.5, 0.25]
        header.RescaleSlope, header.RescaleIntercept = slope, 0 if slope == 1 else -3
        header.PixelData = plane.astype("<i2").tobytes()
        for name, value in other.items():
            setattr(header, name, value(z) if callable(value) else value)
        header.save_as(folder / f"{(7 * z) % 29:02}.dcm", enforce_file_format=True)


def netcdf(path: Path, x: np.ndarray, scale: float | None = None) -> None:
    """Write a variable with coordinates; of scaled values the stored ones are `x`."""
    netcdf4 = pytest.importorskip("netCDF4")
    with netcdf4.Dataset(path, "w") as file:
        for name, n in zip(("time", "lev", "lat", "lon"), x.shape, strict=True):
            file.createDimension(name, n)
            file.createVariable(name, "f8", (name,))[:] = np.arange(n)
        made = file.createVariable("t2m", x.dtype, ("time", "lev", "lat", "lon"), zlib=True)
        made.units = "K"
        made.set_auto_maskandscale(False)
        if scale is not None:
            made.scale_factor, made.add_offset = scale, 270.0
        made[:] = x


def _write(name: str, write: Callable[[Path], None]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        on_rank_zero(lambda: write(folder / name))
        return folder / name

    return make


def _several(suffix: str, write: Callable[[Path, np.ndarray], None]) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        paths = [folder / f"{i}{suffix}" for i in (1, 0)]
        on_rank_zero(lambda: [write(path, X + i) for i, path in enumerate(paths)])
        return paths

    return make


def _planes(folder: Path) -> Any:
    def write() -> None:
        tifffile = pytest.importorskip("tifffile")
        for z, plane in enumerate(X[0]):
            tifffile.imwrite(folder / f"plane{z:02}.tif", plane)

    on_rank_zero(write)
    return open_stack(folder / "plane*.tif")


ONE = X[None]
"""One sample with channels."""

FORMS: dict[str, tuple[Callable[[Path], Any], np.ndarray]] = {
    "nii": (_write("x.nii", lambda p: nifti(p, X)), ONE),
    "nii.gz": (_write("x.nii.gz", lambda p: nifti(p, X[:1])), ONE[:, :1]),
    "scaled nii": (_write("x.nii", lambda p: nifti(p, X[:1], 0.5)), ONE[:, :1] * 0.5 + 1),
    "ome-tiff": (_write("x.ome.tif", lambda p: tiff(p, X)), ONE),
    "deflated tiles": (
        _write("x.tif", lambda p: tiff(p, X, tile=(16, 16), compression="zlib")),
        ONE,
    ),
    "big-endian tiff": (_write("x.tif", lambda p: tiff(p, X, byteorder=">", bigtiff=True)), ONE),
    "tiff stack": (_planes, ONE[:, :1]),
    "dicom": (_write("series", lambda p: dicom(p, X[0])), ONE[:, :1]),
    "scaled dicom": (_write("series", lambda p: dicom(p, X[0], 0.5)), ONE[:, :1] * 0.5 - 3),
    "npz": (_write("x.npz", lambda p: np.savez(p, x=X, y=X[0]) or None), X),
    "compressed npz": (_write("x.npz", lambda p: np.savez_compressed(p, x=X)), X),
    "netcdf": (_write("x.nc", lambda p: netcdf(p, X)), X),
    "scaled netcdf": (_write("x.nc", lambda p: netcdf(p, X, 0.5)), X * 0.5 + 270),
    "list of nii": (_several(".nii", nifti), np.stack([X, X + 1])),
    "list of npy": (_several(".npy", np.save), np.stack([X, X + 1])),
}


@every_size
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_read_by_boxes_with_its_type(folder: Path, form: str) -> None:
    make, expected = FORMS[form]
    for package in ("nibabel", "tifffile", "pydicom", "netCDF4"):
        if form.split()[-1][:3] in (package[:3], {"dicom": "pyd"}.get(form.split()[-1])):
            pytest.importorskip(package)
    grid = dc.ProcessGrid(sample=2, height=2) if dc.ProcessGrid(width=-1).size == 4 else None
    source = make(folder)
    names = ["x"] if "npz" in form else ["t2m"] if "netcdf" in form else None
    data = Dataset(source, grid or dc.ProcessGrid(height=-1), inputs=names, dtype=None)
    (read,) = data.fields.values()
    assert (read.samples, *read.shape) == expected.shape and read.dtype == expected.dtype
    batch = data.batch(range(data.samples)).full_tensor().numpy()
    assert np.array_equal(batch, expected)


def single(path: Any, name: str | None = None) -> Any:
    """Return the source on a path."""
    (source,) = open_sources(path, [name] if name else []).values()
    return source


def test_what_scanners_say_of_an_image_is_kept(tmp_path: Path) -> None:
    nifti(tmp_path / "x.nii", X)
    found = single(tmp_path / "x.nii").attributes
    assert np.array_equal(found["affine"], AFFINE)
    assert (found["spacing"], found["unit"]) == ([1.5, 3, 2], "mm")
    tiff(tmp_path / "x.tif", X)
    assert single(tmp_path / "x.tif").attributes == {"spacing": [3, 2, 0.5], "unit": "micron"}
    dicom(tmp_path / "series", X[0])
    found = single(tmp_path / "series").attributes
    assert found["spacing"] == [2.5, 0.5, 0.25]
    # Plane 1, row 2, column 3 lies at 10 + 3 * 0.25 to the left, 20 + 2 * 0.5 behind, 2.5 above.
    assert (np.array(found["affine"]) @ [1, 2, 3, 1]).tolist() == [-10.75, -21, 2.5, 1]
    netcdf(tmp_path / "x.nc", X, 0.5)
    assert single(tmp_path / "x.nc").attributes == {"units": "K"}


def test_what_cannot_be_read_by_boxes_says_what_it_fetches(tmp_path: Path) -> None:
    nifti(tmp_path / "x.nii", X)
    nifti(tmp_path / "x.nii.gz", X)
    tiff(tmp_path / "x.tif", X)
    tiff(tmp_path / "packed.tif", X, compression="zlib")
    np.savez(tmp_path / "x.npz", x=X)
    np.savez_compressed(tmp_path / "packed.npz", x=X)
    fetched = {}
    for path in tmp_path.iterdir():
        source = single(path)
        start = (0,) * len(source.shape)
        fetched[path.name] = source.fetched(Box(start, (*(1,) * len(start[2:]), 6, 7)))
    plane, whole = 6 * 7 * 2, X.nbytes
    assert fetched == {
        **{"x.nii": plane, "x.tif": plane, "x.npz": plane, "packed.tif": plane},
        **{"x.nii.gz": whole, "packed.npz": whole},
    }


def test_virtual_datasets_and_links_are_read_when_asked_for(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    layout = h5py.VirtualLayout(shape=X.shape, dtype=X.dtype)
    for i, part in enumerate(X):
        with h5py.File(tmp_path / f"{i}.h5", "w") as file:
            file["x"] = part
        layout[i] = h5py.VirtualSource(tmp_path / f"{i}.h5", "x", shape=part.shape)
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("virtual", layout)
        file["link"] = h5py.ExternalLink("0.h5", "x")
    with pytest.raises(ValueError, match="external=True"):
        HDF5Source(tmp_path / "all.h5", "virtual")
    for name, expected in (("virtual", X[1]), ("link", X[0, 1])):
        source = HDF5Source(tmp_path / "all.h5", name, external=True)
        out = np.empty(source.shape, source.dtype)
        source.read_into(out, 1, Box((0,) * out.ndim, out.shape))
        assert np.array_equal(out, expected)


def test_an_array_of_xarray_is_read_as_it_was_decoded(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    netcdf(tmp_path / "x.nc", X, 0.5)
    with xarray.open_dataset(tmp_path / "x.nc", engine="netcdf4") as file:
        source = single({"t2m": file["t2m"]}, "t2m")
        out = np.empty(source.shape, source.dtype)
        source.read_into(out, 1, Box((0, 0, 0), out.shape))
        assert np.array_equal(out, X[1] * 0.5 + 270) and source.attributes == {"units": "K"}


def test_zarr_is_read_from_groups_in_groups_and_from_zip_files(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    with zarr.storage.ZipStore(tmp_path / "x.zarr.zip", mode="w") as store:
        group = zarr.open_group(store, mode="w")
        group.create_group("images").create_array("0", data=X)
    source = single(tmp_path / "x.zarr.zip", "images/0")
    out = np.empty(source.shape, source.dtype)
    source.read_into(out, 1, Box((0, 0, 0), out.shape))
    assert np.array_equal(out, X[1])


def shard(path: Path, first: int, count: int) -> None:
    """Write samples of WebDataset into a tar file."""
    with tarfile.open(path, "w") as archive:
        for i in range(first, first + count):
            content = io.BytesIO()
            np.save(content, X[i % 2] + i)
            for name, data in (("x.npy", content.getvalue()), ("cls", str(7 * i).encode())):
                entry = tarfile.TarInfo(f"train/{i:04}.{name}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))


@every_size
def test_shards_of_webdataset_are_read_by_boxes(folder: Path) -> None:
    on_rank_zero(lambda: [shard(folder / f"{k}.tar", 3 * k, 3) for k in range(2)] and None)
    data = Dataset(folder / "*.tar", dc.ProcessGrid(height=-1), inputs="x.npy", targets="cls")
    assert data.samples == 6
    x, y = data.batch([4, 1])
    expected = np.stack([X[0] + 4, X[1] + 1])
    assert np.array_equal(x.full_tensor(), expected)
    assert np.array_equal(y.full_tensor(), [28, 7])
    source = single(folder / "0.tar", "x.npy")
    assert source.fetched(Box((0, 0, 0), (1, 1, 1))) == 2
    names = r"has the fields \['cls', 'x.npy'\]; name one"
    fails_everywhere(lambda: Dataset(folder / "0.tar", data.grid), names)
    on_rank_zero(lambda: (folder / "bad.tar").write_bytes(b"no shard" * 99) and None)
    fails_everywhere(
        lambda: Dataset(folder / "bad.tar", data.grid, inputs="cls"), "not a whole .tar file"
    )


@both
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_zarr_is_read_from_object_stores(folder: Path, kind: str) -> None:
    zarr, fsspec = pytest.importorskip("zarr"), pytest.importorskip("fsspec")
    url = f"file://{folder}/x.zarr" if kind == "file" else "memory://bucket/x.zarr"

    def write() -> None:
        zarr.open_group(folder / "x.zarr", mode="w")["x"] = X

    on_rank_zero(write)
    if kind == "memory":  # each rank has a store of its own
        fsspec.filesystem("memory").put(str(folder / "x.zarr"), "/bucket/x.zarr", recursive=True)
    data = Dataset(url, dc.ProcessGrid(depth=-1), inputs="x")
    assert torch.equal(
        data.batch([1, 0]).full_tensor(), torch.from_numpy(X[::-1, None].copy())[:, 0]
    )
    fails_everywhere(lambda: Dataset(f"{url}z", data.grid), "write simplecache::.*x.zarrz to copy")
    none = url.replace("x.zarr", "none.zarr")
    fails_everywhere(lambda: Dataset(none, data.grid), r"none.zarr: not a whole zarr folder")


@both
@pytest.mark.parametrize("name", ["x.h5", "x.nc", "x.npy", "x.nii.gz"])
def test_files_are_read_from_object_stores_by_boxes_or_as_copies(folder: Path, name: str) -> None:
    fsspec, h5py = pytest.importorskip("fsspec"), pytest.importorskip("h5py")
    path = folder / name

    def write() -> None:
        if name == "x.npy":
            np.save(path, X)
        elif name == "x.nii.gz":
            nifti(path, X[:1])
        else:
            with h5py.File(path, "w") as file:
                file.create_dataset("x", data=X, chunks=(1, 3, *X.shape[2:]))

    on_rank_zero(write)
    # Each rank has a store of its own.
    fsspec.filesystem("memory").put(str(path), f"/bucket/{name}")
    grid = dc.ProcessGrid(height=-1)
    url = f"memory://bucket/{name}"
    inputs = "x" if name in ("x.h5", "x.nc") else None
    expected = Dataset(path, grid, inputs=inputs).batch([0]).full_tensor()
    for place in (url, f"simplecache::{url}"):
        if inputs or place != url:
            found = Dataset(place, grid, inputs=inputs).batch([0]).full_tensor()
            assert torch.equal(found, expected)
        else:
            fails_everywhere(lambda: Dataset(url, grid), f"write simplecache::{url} to copy")
    with fsspec.open("memory://bucket/all.zip", "wb") as file, zipfile.ZipFile(file, "w") as packed:
        packed.write(path, name)
    inside = f"zip://{name}::memory://bucket/all.zip"
    fails_everywhere(lambda: Dataset(inside, grid), f"write simplecache::{inside} to copy")
    every = f"simplecache::memory://bucket/*{name[1:]}"
    if inputs is None:
        assert torch.equal(Dataset(every, grid).batch([0]).full_tensor(), expected)
    none = f"memory://bucket/none/{name}"
    fails_everywhere(
        lambda: Dataset(f"simplecache::{none}", grid, inputs=inputs), "cannot be opened"
    )


@both
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.nii", "x.nii: not a whole NIfTI file"),
        ("x.tif", "x.tif: not a whole TIFF file"),
        ("x.npz", "x.npz: not a whole .npz file"),
        ("missing.nii.gz", "missing.nii.gz: no such file"),
    ],
)
def test_damaged_and_missing_files_are_one_error_on_all_ranks(
    folder: Path, name: str, message: str
) -> None:
    if not name.startswith("missing"):
        on_rank_zero(lambda: (folder / name).write_bytes(b"no image") and None)
    fails_everywhere(lambda: Dataset(folder / name, dc.ProcessGrid(height=-1)), message)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"SeriesInstanceUID": lambda z: f"1.{z + 1}"}, "holds 5 series"),
        ({"ImagePositionPatient": lambda z: [0, 0, z * z]}, "planes at distances from 1 to 7 mm"),
        ({"NumberOfFrames": 2}, "several frames"),
    ],
)
def test_series_that_are_no_volume_are_refused(
    tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    dicom(tmp_path / "series", X[0], **other)
    with pytest.raises(ValueError, match=message):
        single(tmp_path / "series")


def test_frames_are_samples_and_files_of_several_are_refused(tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(tmp_path / "t.ome.tif", X, ome=True, metadata={"axes": "TZYX"})
    source = single(tmp_path / "t.ome.tif")
    assert (source.samples, source.shape) == (2, (1, 5, 6, 7))
    with pytest.raises(ValueError, match="holds 2 samples; expected one in each file"):
        single([tmp_path / "t.ome.tif"] * 2)


@every_size
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz", ".tif", ".npz", ".h5", ".zarr", ".nc"])
@pytest.mark.parametrize("channels", [1, 2])
def test_what_is_written_is_read_again_with_its_attributes(
    folder: Path, suffix: str, channels: int
) -> None:
    pytest.importorskip({".tif": "tifffile"}.get(suffix, "nibabel"))
    grid = dc.ProcessGrid(height=2, width=-1) if WORLD.size > 1 else dc.ProcessGrid(width=1)
    x = torch.from_numpy(ONE[:, :channels])
    spacing, unit = [1.5, 3.0, 2.0], "mm"
    attributes = {"affine": AFFINE.tolist(), "spacing": spacing, "unit": unit}
    path = dc.data.save(folder / f"x{suffix}", dc.distribute_tensor(x, grid), attributes=attributes)
    data = Dataset(path, grid)
    assert torch.equal(data.batch(range(data.samples)).full_tensor().reshape(x.shape), x)
    (source,) = data.fields.values()
    kept = {
        ".npz": {},
        ".tif": {"spacing": [1000 * n for n in spacing], "unit": "micron"},
    }.get(suffix, attributes)
    assert source.attributes == kept and source.dtype == np.int16
    WORLD.barrier()
    assert [found.name for found in folder.iterdir()] == [path.name]


def test_other_programs_read_what_is_written(tmp_path: Path) -> None:
    nibabel, tifffile = (pytest.importorskip(name) for name in ("nibabel", "tifffile"))
    netcdf4 = pytest.importorskip("netCDF4")
    x = dc.distribute_tensor(torch.from_numpy(ONE), dc.ProcessGrid(width=1))
    for name in ("x.nii.gz", "x.tif", "x.npz", "x.nc"):
        attributes = {} if name == "x.npz" else {"affine": AFFINE.tolist()}
        dc.data.save(tmp_path / name, x, attributes=attributes)
    image = nibabel.load(tmp_path / "x.nii.gz")
    assert np.array_equal(image.dataobj, X.transpose(1, 2, 3, 0))
    assert np.array_equal(image.affine, AFFINE)
    assert np.array_equal(tifffile.imread(tmp_path / "x.tif"), X)
    assert np.array_equal(np.load(tmp_path / "x.npz")["data"], ONE)
    with netcdf4.Dataset(tmp_path / "x.nc") as file:
        assert np.array_equal(file["data"][:], ONE)


@both
@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("x.nii", (2, 1, 4, 4), torch.float32, "holds one sample"),
        ("x.tif", (1, 4), torch.float32, "holds one sample"),
        ("x.nii.gz", (1, 1, 4, 4), torch.bool, "NIfTI has no bool; convert the tensor"),
        ("x.dcm", (1, 1, 4, 4), torch.float32, "is not supported for writing"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_on_all_ranks(
    folder: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype, message: str
) -> None:
    x = dc.distribute_tensor(torch.ones(shape, dtype=dtype), dc.ProcessGrid(width=-1))
    fails_everywhere(lambda: dc.data.save(folder / name, x), message)
    assert list(folder.iterdir()) == []
