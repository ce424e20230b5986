"""`infer` writes what one device would compute, from file to file, whole and in slabs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import distconv as dc
from distconv.__main__ import main
from distconv.data import Normalize
from distconv.data.sources.opening import open_sources
from distconv.geometry.layout import Box
from distconv.planning.dry_run import DryRunGrid
from distconv.planning.recorded_step import autocast_of
from distconv.tools import infer as module
from distconv.tools.infer import code_of
from distconv.tools.slabs import GlobalNorm, receptive_field
from tests.data.test_volumes import AFFINE, dicom, netcdf, nifti, tiff
from tests.support.everywhere import WORLD, ended_with_one_line, fails_everywhere, on_rank_zero

every_size = pytest.mark.parallel([1, 2, 4])
both = pytest.mark.parallel([1, 2])

pytestmark = pytest.mark.filterwarnings("ignore:.*is stored in chunks")

SHAPE = (27, 10, 9)
VOLUME = np.random.default_rng(0).integers(-1000, 1000, SHAPE).astype(np.int16)


class Net(nn.Module):
    """A small U-Net with running statistics, in float64."""

    def __init__(self, inputs: int = 1, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Sequential(nn.Conv3d(inputs, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU())
        self.down = nn.Conv3d(4, 6, 3, stride=2, padding=1)
        self.middle = nn.Sequential(nn.Conv3d(6, 6, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose3d(6, 4, 2, stride=2)
        self.last = nn.Conv3d(8, classes, 1)
        self.double()
        with torch.no_grad():
            self.first[1].running_mean.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        z = self.up(self.middle(self.down(y)))
        z = z[:, :, : y.shape[2], : y.shape[3], : y.shape[4]]
        return self.last(torch.cat([y, z], 1))


def grid() -> dc.ProcessGrid:
    """Return a grid that partitions the longest dimension, and another one on four ranks."""
    return dc.ProcessGrid(depth=-1, width=2 if WORLD.size == 4 else 1)


def serial(net: nn.Module, x: np.ndarray) -> np.ndarray:
    """Return the result of the plain module."""
    with torch.no_grad():
        return net.eval()(torch.from_numpy(x.astype(np.float64))).numpy()


def content(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """Return all samples of a file, and its attributes."""
    (source,) = open_sources(path).values()
    out = np.empty((source.samples, *source.shape), source.dtype)
    for i in range(source.samples):
        source.read_into(out[i], i, Box((0,) * (out.ndim - 1), source.shape))
    return out, dict(source.attributes)


def write(folder: Path, name: str) -> Path:
    """Write the volume in the format of the suffix."""
    path = folder / name
    x = VOLUME[None]
    form = {"nii": nifti, "gz": nifti, "tif": tiff, "npz": lambda p, x: np.savez(p, x=x)}
    form |= {"npy": np.save, "series": lambda p, x: dicom(p, x[0])}
    form |= {"nc": lambda p, x: netcdf(p, x, 0.5)}
    on_rank_zero(lambda: form[name.rpartition(".")[2]](path, x))
    return path


@every_size
@pytest.mark.parametrize("slabs", [None, 3])
@pytest.mark.parametrize(
    ("name", "result"),
    [
        *(("x.nii.gz", "y.zarr"), ("x.nii", "y.nii.gz"), ("x.tif", "y.tif"), ("x.npz", "y.npz")),
        *(("x.npy", "y.npy"), ("series", "y.nii"), ("x.nc", "y.h5")),
    ],
)
def test_each_format_becomes_what_one_device_computes(
    folder: Path, name: str, result: str, slabs: int | None
) -> None:
    for package in ("nibabel", "tifffile", "pydicom", "netCDF4"):
        pytest.importorskip(package)
    source, net = write(folder, name), Net()
    field = "t2m" if name == "x.nc" else None
    path = dc.infer(net, source, folder / result, grid(), slabs=slabs, field=field)
    x = VOLUME * 0.5 + 270 if name == "x.nc" else VOLUME
    expected = serial(net, x[None, None])
    found, attributes = content(path)
    assert found.dtype == np.float64
    assert np.abs(found - expected).max() <= 1e-12 * np.abs(expected).max()
    if name in ("x.nii.gz", "x.nii"):
        assert np.allclose(attributes["affine"], AFFINE, atol=1e-6)
    if name == "x.nc":
        assert attributes == {"units": "K"}
    WORLD.barrier()
    assert not list(folder.glob("*.partial*"))


@both
def test_coordinates_of_netcdf_are_kept_where_extents_are_equal(folder: Path) -> None:
    netcdf4 = pytest.importorskip("netCDF4")
    source = write(folder, "x.nc")

    def add_units() -> None:
        with netcdf4.Dataset(source, "a") as file:
            file["time"].units = "hours since 2000-01-01"
            file["lat"][:] = np.linspace(-90, 90, SHAPE[1])

    on_rank_zero(add_units)
    net = nn.Conv3d(1, 1, (1, 1, 3)).double()  # two longitudes fewer
    path = dc.infer(net, source, folder / "y.nc", grid(), field="t2m", slabs=2)
    xarray = pytest.importorskip("xarray")
    with xarray.open_dataset(path, engine="netcdf4") as found:
        data = found["data"]
        assert data.dims == ("time", "data_dimension_1", "lev", "lat", "data_dimension_4")
        assert set(data.coords) == {"time", "lev", "lat"} and data.shape == (1, 1, 27, 10, 7)
        assert str(data.time.values[0]) == "2000-01-01T00:00:00.000000000"
        assert np.array_equal(data.lat, np.linspace(-90, 90, SHAPE[1]))
        assert np.allclose(data[:, 0, :, :, 1], content(path)[0][:, 0, :, :, 1])


@every_size
def test_several_volumes_are_transformed_and_labelled(folder: Path) -> None:
    x = np.stack([VOLUME, VOLUME[::-1], VOLUME + 1])[:, None].repeat(2, 1)
    own = dc.ProcessGrid(sample=2, depth=-1) if WORLD.size == 4 else grid()
    net = Net(inputs=2, classes=5)
    net.train()
    to_unit = Normalize([10.0, 20.0], [300.0, 400.0])
    options: dict[str, Any] = {"transform": to_unit, "argmax": True, "slabs": 2}
    path = dc.infer(net, x, folder / "labels.zarr", own, **options)
    assert net.training and all(p.device.type == "cpu" for p in net.parameters())
    unit = (x - np.reshape([10, 20], (2, 1, 1, 1))) / np.reshape([300, 400], (2, 1, 1, 1))
    found, _ = content(path)
    assert found.dtype == np.uint8
    assert np.array_equal(found[:, 0], serial(net, unit).argmax(1))


@both
def test_a_parallelized_module_and_two_dimensions_are_taken(folder: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3)).double()
    x = np.random.default_rng(1).normal(size=(1, 3, 48, 20))
    expected = serial(net, x)
    own = dc.ProcessGrid(height=-1)
    dc.parallelize(net, own)
    for slabs in (None, 4):
        path = dc.infer(net, x, folder / "y.h5", own, slabs=slabs, overwrite=True)
        assert np.abs(content(path)[0] - expected).max() < 1e-12


@both
def test_autocast_computes_in_halves(folder: Path) -> None:
    net = Net().float()
    path = dc.infer(net, VOLUME[None] / 1000, folder / "y.npy", grid(), autocast=torch.bfloat16)
    found, exact = content(path)[0], serial(net.double(), VOLUME[None, None] / 1000)
    difference = np.abs(found - exact).max()
    assert found.dtype == np.float32 and 1e-5 < difference < 0.1 * np.abs(exact).max()


@both
def test_memory_decides_on_slabs_and_is_said_beforehand(folder: Path) -> None:
    said: list[str] = []
    x = np.random.default_rng(2).normal(size=(1, 1, 240, 8, 8))
    dc.infer(Net(), x, folder / "whole.npy", grid(), progress=said.append)
    assert "1 slab(s) each" in said[0] and "of memory on a rank" in said[0]
    limit = 800_000 // WORLD.size
    dc.infer(Net(), x, folder / "y.npy", grid(), memory=limit, progress=said.append)
    assert said[-1].split(" slabs")[0] in ("3 of 3", "4 of 4", "5 of 5"), said
    assert np.allclose(np.load(folder / "y.npy"), np.load(folder / "whole.npy"), atol=1e-12)
    fails_everywhere(
        lambda: dc.infer(Net(), x, folder / "z.npy", grid(), memory=10_000),
        "infer: a slab of .* elements needs .*Use more ranks",
    )


@both
@pytest.mark.parametrize("suffix", [".npy", ".zarr", ".nii.gz"])
def test_a_run_that_ended_early_continues_where_it_was(
    folder: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nibabel")
    path, net, x = folder / f"y{suffix}", Net(), VOLUME[None, None]

    def infer(**options: Any) -> Path:
        return dc.infer(net, x, path, grid(), slabs=4, **options)

    computed = module._Run.output
    count = []

    def counted(self: Any, first: int, slab: Any) -> Any:
        count.append(slab)
        if len(count) == 3:
            raise KeyboardInterrupt
        return computed(self, first, slab)

    monkeypatch.setattr(module._Run, "output", counted)
    with pytest.raises(KeyboardInterrupt):
        infer()
    assert not path.exists()
    notes = json.loads((folder / f"y{suffix}.partial.json").read_text())
    assert notes["finished"] == 2
    WORLD.barrier()
    fails_everywhere(lambda: infer(argmax=True), "belongs to another run, with other result")

    def breaks(self: Any, first: int, slab: Any, box: Any) -> Any:
        if WORLD.rank == 0:
            raise OSError("the disk is gone")
        return read(self, first, slab, box)

    read = module._Run._read
    with monkeypatch.context() as context:
        context.setattr(module._Run, "_read", breaks)
        fails_everywhere(infer, f"the disk is gone. .*y{suffix}.partial keeps 2 finished steps")
    count.pop()
    infer()
    assert len(count) == 5 and np.allclose(content(path)[0], serial(net, x), atol=1e-12)
    WORLD.barrier()
    with monkeypatch.context() as context:
        context.setattr(module._Run, "_read", breaks)
        fails_everywhere(lambda: infer(overwrite=True), "^the disk is gone$")
    assert [found.name for found in folder.iterdir()] == [path.name]
    WORLD.barrier()
    count[:] = [None] * 9
    infer(overwrite=True, restart=True)
    assert len(count) == 13


class Aligned(nn.Module):
    """A module with interpolation that depends on the size of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 1, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return nn.functional.interpolate(y, x.shape[2:], mode="trilinear", align_corners=True)


class Attention(nn.Module):
    """A module in which every element depends on all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.attend = nn.Conv3d(1, 4, 3, padding=1), nn.MultiheadAttention(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        z = y.flatten(2).permute(2, 0, 1)
        return self.attend(z, z, z)[0].permute(1, 2, 0).reshape(y.shape)


class OwnNorm(nn.Module):
    """A norm by a function in place of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.instance_norm(self.conv(x))


class CalledTwice(nn.Module):
    """A module with a norm that is called with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv3d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.norm(self.conv(x)).relu())


@both
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (OwnNorm, r"OwnNorm \(OwnNorm\) needs the whole depth at once.*more ranks"),
        (CalledTwice, r"calls norm \(GroupNorm\) several times"),
        (
            lambda: nn.Sequential(nn.Conv3d(1, 1, 1), *(nn.InstanceNorm3d(1) for _ in range(65))),
            r"65 \(InstanceNorm3d\) is norm 65 of 65 over the whole volume; .* at most 64",
        ),
        (Attention, r"\(MultiheadAttention\) needs the whole depth at once"),
        (Aligned, "outputs of a slab differ by .*align_corners=True"),
        (
            lambda: nn.Conv3d(1, 1, 3, padding=1, padding_mode="circular"),
            "outputs of a slab differ by",
        ),
    ],
)
def test_networks_whose_slabs_would_differ_are_refused_and_run_whole(
    folder: Path, make: Callable[[], nn.Module], message: str
) -> None:
    net = make().double()  # with random weights that are equal on all ranks, unlike at import
    x = np.random.default_rng(3).normal(size=(1, 1, 40, 6, 6))
    fails_everywhere(lambda: dc.infer(net, x, folder / "y.npy", grid(), slabs=2), message)
    assert not list(folder.iterdir())
    WORLD.barrier()
    path = dc.infer(net, x, folder / "y.npy", grid())
    assert np.allclose(content(path)[0], serial(net, x), atol=1e-12)


class GlobalNet(nn.Module):
    """A small U-Net whose norms have statistics of the whole volume, in float64."""

    def __init__(self, padding: int = 1) -> None:
        super().__init__()
        self.unused = nn.GroupNorm(1, 4)
        self.first = nn.Sequential(
            *(nn.Conv3d(1, 4, 3, padding=padding), nn.InstanceNorm3d(4, affine=True), nn.ReLU()),
            *(nn.Conv3d(4, 4, 3, padding=padding), nn.GroupNorm(2, 4), nn.ReLU()),
        )
        self.down = nn.Sequential(nn.Conv3d(4, 6, 3, 2, 1), nn.InstanceNorm3d(6), nn.ReLU())
        self.up, self.norm = nn.ConvTranspose3d(6, 4, 2, 2), nn.GroupNorm(4, 4)
        self.last = nn.Conv3d(8, 3, 1)
        self.double()
        numbers = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(generator=numbers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        z = self.norm(self.up(self.down(y)))[:, :, : y.shape[2], : y.shape[3], : y.shape[4]]
        return self.last(torch.cat([y, z], 1))


@every_size
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("slabs", [2, 5])
def test_norms_over_the_whole_volume_go_through_slabs(
    folder: Path, padding: int, slabs: int
) -> None:
    net = GlobalNet(padding)
    x = np.random.default_rng(6).normal(5, 3, (3, 1, 61, 9, 8))
    x[:, :, 40:] += 20  # the mean of a slab is not that of the volume
    x[1] *= 3
    said: list[str] = []
    own = dc.ProcessGrid(sample=2, depth=-1) if WORLD.size == 4 else grid()
    path = dc.infer(net, x, folder / "y.npy", own, slabs=slabs, progress=said.append)
    expected = serial(net, x)
    assert np.abs(content(path)[0] - expected).max() <= 1e-12 * np.abs(expected).max()
    assert "after 4 passes for the statistics of norms" in said[0]


@pytest.mark.parametrize(
    ("device", "norm", "expected"),
    [
        ("cpu", nn.GroupNorm(2, 4), torch.bfloat16),
        ("cpu", nn.InstanceNorm3d(4), torch.bfloat16),
        ("cuda", nn.GroupNorm(2, 4), torch.float32),  # as torch's documentation lists it
        ("cuda", nn.InstanceNorm3d(4), torch.bfloat16),
    ],
)
def test_norms_of_slabs_have_the_type_that_autocast_chooses_on_the_device(
    device: str, norm: nn.Module, expected: torch.dtype
) -> None:
    grid = DryRunGrid({"height": 2}, gpu=device == "cuda")
    with torch.no_grad(), autocast_of(device, torch.bfloat16), torch.device("meta"):
        own = GlobalNorm(norm.to("meta"), 5)
        for kind, result in ((torch.bfloat16, expected), (torch.float32, torch.float32)):
            x = grid.tensor((1, 4, 4, 4, 4), dtype=kind)
            own.give(torch.zeros(1, 4), torch.ones(1, 4))
            assert own(x).dtype == result
            own.give(None, None)
            assert own(x).dtype == result


@both
def test_statistics_of_norms_are_not_taken_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = GlobalNet(), np.random.default_rng(7).normal(5, 3, (1, 1, 61, 9, 8))
    reads, read = [], module._Run.input

    def counted(self: Any, first: int, slab: Any) -> Any:
        reads.append(slab)
        if len(reads) == stop:
            raise KeyboardInterrupt
        return read(self, first, slab)

    monkeypatch.setattr(module._Run, "input", counted)
    # Two norms have their statistics; then all four have, and two slabs are written.
    for stop in (2 * 3 + 2, 2 * 3 + 2 + 1):
        with pytest.raises(KeyboardInterrupt):
            dc.infer(net, x, folder / "y.npy", grid(), slabs=3)
        WORLD.barrier()
        assert len(reads) == stop
        reads.clear()
    stop = -1
    dc.infer(net, x, folder / "y.npy", grid(), slabs=3)
    assert len(reads) == 1
    assert np.allclose(content(folder / "y.npy")[0], serial(net, x), atol=1e-11)


@both
def test_unpadded_and_wide_convolutions_go_through_slabs(folder: Path) -> None:
    x = np.random.default_rng(4).normal(size=(1, 1, 64, 24))
    nets = [
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 1, 3)),
        nn.Conv2d(1, 1, 7),
        nn.Sequential(nn.ReflectionPad2d(5), nn.Conv2d(1, 1, 11)),
    ]
    for i, net in enumerate(nets):
        path = dc.infer(net.double(), x, folder / f"{i}.npy", grid(), slabs=3)
        assert np.allclose(content(path)[0], serial(net, x), atol=1e-12)


def test_a_run_knows_thecode_of_its_transform() -> None:
    assert code_of(lambda x, box: x + 1) == code_of(lambda x, box: x + 1)
    assert code_of(lambda x, box: x + 1) != code_of(lambda x, box: x + 2)
    assert code_of(dc.data.Normalize(0.0, 1.0)) != code_of(dc.data.Normalize(0.0, 2.0))


def test_the_receptive_field_is_the_sum_of_halos_times_strides() -> None:
    field = receptive_field(Net().eval(), (1, 1, 9, 9, 9), 2, torch.float64)
    # One element by the first, one by the strided, and two by the middle convolution.
    assert (field.reach, field.stride, field.ratio) == (4, 2, 1)


@both
@pytest.mark.parametrize(
    ("net", "source", "sink", "message"),
    [
        (Net(), "missing.nii.gz", "y.npy", "missing.nii.gz: no such file"),
        (Net(inputs=2), "x.npy", "y.npy", r"first.0 \(Conv3d\) raised RuntimeError: .*channels"),
        (Net(), "x.npy", "x.npy", "x.npy exists; choose another name, or overwrite=True"),
        (Net(), "x.npy", "y.png", "'.png' is not supported for writing"),
        (Net(), "x.npy", "none/y.npy", "there is no folder"),
        (nn.Conv2d(1, 1, 3).double(), "x.npz", "y.npy", "convolutions of 2 dimensions"),
        (nn.Sequential(nn.Conv3d(1, 1, 3), nn.Flatten()), "x.npy", "y.npy", "expected one tensor"),
    ],
)
def test_bad_input_is_one_error_on_all_ranks_before_anything_is_written(
    folder: Path, net: nn.Module, source: str, sink: str, message: str
) -> None:
    on_rank_zero(lambda: np.save(folder / "x.npy", VOLUME[None, None]))
    on_rank_zero(lambda: np.savez(folder / "x.npz", x=VOLUME[None, None]))
    before = sorted(folder.iterdir())
    fails_everywhere(lambda: dc.infer(net, folder / source, folder / sink, grid()), message)
    WORLD.barrier()
    assert sorted(folder.iterdir()) == before


FILE = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv3d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv3d(3, 2, 1)).double()
"""


@both
@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_command_segments_an_image_with_saved_weights(
    folder: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(folder, "x.nii.gz")
    save_file = pytest.importorskip("safetensors.torch").save_file

    def prepare() -> None:
        (folder / "net.py").write_text(FILE)
        state = made.state_dict()
        torch.save({"state_dict": state}, weights) if suffix == ".pt" else save_file(state, weights)

    weights, space = folder / f"w{suffix}", {}
    exec(FILE, space)
    torch.manual_seed(5)
    made: Any = space["net"]()
    on_rank_zero(prepare)
    case = ["infer", f"{folder / 'net.py'}:net", "--weights", str(weights), "--input", str(source)]
    case += ["--output", str(folder / "seg.zarr"), "--grid", "depth=-1", "--argmax"]
    assert main(case) == 0
    found, attributes = content(folder / "seg.zarr")
    assert np.array_equal(found[:, 0], serial(made, VOLUME[None, None]).argmax(1))
    assert np.allclose(attributes["affine"], AFFINE)
    assert capsys.readouterr().out.count("wrote ") == (WORLD.rank == 0)
    ended_with_one_line(lambda: main(case), "seg.zarr exists", capsys)
    on_rank_zero(lambda: torch.save({"0.weight": torch.ones(1)}, folder / "other.pt"))
    case[3] = str(folder / "other.pt")
    ended_with_one_line(lambda: main(case), "holds the weights of another network: Error", capsys)
    on_rank_zero(lambda: (folder / "other.pt").write_bytes(b"no weights") and None)
    ended_with_one_line(lambda: main(case), "is damaged, or holds other objects", capsys)
    case[3] = "none.pt"
    with pytest.raises(SystemExit):
        main(case)
    expected = "python -m distconv infer: error: --weights none.pt: no such file\n"
    assert capsys.readouterr().err == expected * (WORLD.rank == 0)  # without the usage


def test_describe_says_what_ranks_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("nibabel")
    nifti(tmp_path / "x.nii.gz", VOLUME[None])
    assert main(["data", "describe", str(tmp_path / "x.nii.gz"), "--grid", "depth=3"]) == 0
    said = capsys.readouterr().out
    assert "1 sample(s) of shape (1, 27, 10, 9), int16, 4.75 KiB" in said
    assert "affine: [[" in said and "fetch 3 times the bytes that they need" in said
    assert "chunks of (1, 1, 9, 10, 9)" in said


@both
def test_a_network_of_monai_segments_an_image(folder: Path) -> None:
    nets = pytest.importorskip("monai.networks.nets")
    source = write(folder, "x.nii.gz")
    torch.manual_seed(0)
    net = nets.UNet(3, 1, 2, (4, 8), (2,), norm="batch").double()
    path = dc.infer(net, source, folder / "seg.nii.gz", dc.ProcessGrid(depth=-1), slabs=2)
    expected = serial(net, VOLUME[None, None])
    assert np.abs(content(path)[0] - expected).max() <= 1e-12 * np.abs(expected).max()
