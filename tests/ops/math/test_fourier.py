"""Fourier transforms equal serial ones, and move each element to one rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import distconv as dc
from benchmarks.measuring.memory import peak_of
from distconv.ops.support import spectra
from tests.support.arriving import arriving
from tests.support.serial import TOLERANCE, agrees, deviation, raised_everywhere, random_tensor
from tests.support.strategies import Case, on_any_grid, shapes

KINDS = "fft", "ifft", "rfft", "irfft", "hfft", "ihfft"


@on_any_grid(40)
def test_transforms_along_any_dimensions_equal_serial(case: Case) -> None:
    shape = [n + 1 for n in case.draw(shapes(1, 4, 5))]
    dims = case.some(range(len(shape))) or [0]
    kind = case.one_of(*KINDS)
    given = {
        "dim": [d - case.one_of(0, len(shape)) for d in dims],
        "s": case.one_of(None, [case.one_of(3, 4, -1) for _ in dims]),
        "norm": case.one_of(None, "ortho", "forward"),
    }
    function = getattr(torch.fft, f"{kind}n")
    case.agrees(lambda x: function(x, **given), case.tensor(shape))


def moved(
    function: Callable[..., Tensor],
    x: Tensor,
    grid: dc.ProcessGrid,
    layout: dc.Layout | None = None,
    parameters: Sequence[Tensor] = (),
) -> dict[str, int]:
    """Check a function of a cut tensor; return the bytes that this rank receives by operators."""
    agrees(function, [x], parameters, grid, random.Random(1), [layout])
    y = dc.distribute_tensor(x, grid, layout).requires_grad_()
    dc.redistributions(reset=True)
    function(y, *parameters).to_local()
    return {entry.operator: entry.bytes for entry in dc.redistributions(reset=True) if entry.bytes}


@pytest.mark.parallel([2, 4])
def test_channels_are_cut_in_place_of_space_and_back_by_inverse_transforms() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = random_tensor(random.Random(0), (1, 8, 8, 6), torch.float64)
    share = x.nbytes // grid.size * (grid.size - 1) // grid.size
    assert moved(torch.fft.rfft2, x, grid) == {"rfft2": share}
    frequencies = torch.fft.rfft2(dc.distribute_tensor(x, grid))
    assert frequencies.grid_layout == dc.Layout(channel="height")
    assert torch.fft.irfft2(frequencies).grid_layout == dc.Layout(height="height")
    assert moved(torch.fft.ifft2, x, grid, dc.Layout()) == {"ifft2": 2 * share}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("name", ["rfftn", "fftn", "ifftn"])
def test_a_volume_of_one_channel_is_whole_on_no_rank(name: str) -> None:
    grid = dc.ProcessGrid(depth=2, height=-1)
    x = random_tensor(random.Random(0), (1, 1, 8, 8, 8), torch.float64)
    function = getattr(torch.fft, name)
    received = moved(lambda x: function(x, dim=(2, 3, 4)), x, grid)[name]
    # Complex numbers take twice the bytes, and move once for each dimension at most.
    assert received <= 3 * 2 * x.nbytes // grid.size


class SpectralConv2d(nn.Module):
    """The spectral layer of the original Fourier neural operator (Li et al., ICLR 2021)."""

    def __init__(self, channels: int, modes: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.modes = modes
        shape = channels, channels, *modes
        self.weights1 = nn.Parameter(torch.rand(shape, dtype=dtype) / channels**2)
        self.weights2 = nn.Parameter(torch.rand(shape, dtype=dtype) / channels**2)

    def compl_mul2d(self, input: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("bixy,ioxy->boxy", input, weights)

    def forward(self, x: Tensor) -> Tensor:
        x_ft = torch.fft.rfft2(x)
        m, n = self.modes
        size = x.shape[0], self.weights1.shape[1], x.size(-2), x.size(-1) // 2 + 1
        out_ft = torch.zeros(*size, dtype=self.weights1.dtype, device=x.device)
        out_ft[:, :, :m, :n] = self.compl_mul2d(x_ft[:, :, :m, :n], self.weights1)
        out_ft[:, :, -m:, :n] = self.compl_mul2d(x_ft[:, :, -m:, :n], self.weights2)
        return torch.fft.irfft2(out_ft, s=(x.size(-2), x.size(-1)))


class ShiftedSpectralConv(nn.Module):
    """The spectral layer of neuraloperator 2.0, for any number of dimensions in space."""

    def __init__(self, channels: int, modes: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        kept = *modes[:-1], modes[-1] // 2 + 1
        self.weight = nn.Parameter(torch.randn(channels, channels, *kept, dtype=dtype) / channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, *sizes = x.shape
        order = len(sizes)
        fft_size = [*sizes[:-1], sizes[-1] // 2 + 1]
        dims = list(range(-order, 0))
        x = torch.fft.rfftn(x, norm="forward", dim=dims)
        if order > 1:
            x = torch.fft.fftshift(x, dim=dims[:-1])
        out_fft = torch.zeros([batch, channels, *fft_size], device=x.device, dtype=x.dtype)
        slices = [slice(None), slice(None)]
        for all_modes, kept in zip(fft_size, self.weight.shape[2:], strict=True):
            center = all_modes // 2
            slices.append(slice(center - kept // 2, center + kept // 2 + kept % 2))
        slices[-1] = slice(None, self.weight.shape[-1])
        index = tuple(slices)
        letters = "xyz"[:order]
        equation = f"bi{letters},io{letters}->bo{letters}"
        out_fft[index] = torch.einsum(equation, x[index], self.weight)
        if order > 1:
            out_fft = torch.fft.fftshift(out_fft, dim=dims[:-1])
        return torch.fft.irfftn(out_fft, s=sizes, dim=dims, norm="forward")


class FNO2d(nn.Module):
    """A Fourier neural operator: fields are lifted, pass spectral layers, and are projected."""

    def __init__(
        self, modes: int, width: int = 8, layers: int = 4, dtype: torch.dtype = torch.cfloat
    ) -> None:
        super().__init__()
        self.p = nn.Conv2d(3, width, 1)
        self.convs = nn.ModuleList(
            SpectralConv2d(width, (modes, modes), dtype) for _ in range(layers)
        )
        self.ws = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
        self.q = nn.Sequential(nn.Conv2d(width, 32, 1), nn.GELU(), nn.Conv2d(32, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.p(x)
        for conv, w in zip(self.convs, self.ws, strict=True):
            x = F.gelu(conv(x) + w(x))
        return self.q(x)


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("shifted", [False, True])
def test_a_spectral_layer_moves_its_kept_modes_alone(shifted: bool) -> None:
    rng = random.Random(0)
    grid = dc.ProcessGrid(height=-1)
    x = random_tensor(rng, (2, 4, 30, 32))
    torch.manual_seed(0)
    layer = (ShiftedSpectralConv if shifted else SpectralConv2d)(4, (6, 3), torch.cdouble)
    names = [name for name, _ in layer.named_parameters()]

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    numbers = moved(call, x, grid, None, [p.detach() for p in layer.parameters()])
    assert set(numbers) <= {"rfft2", "irfft2", "rfftn", "irfftn"}
    assert 0 < sum(numbers.values()) < 0.6 * x.nbytes


@pytest.mark.parallel([2, 4])
def test_a_fourier_neural_operator_moves_and_holds_what_its_modes_take() -> None:
    grid = dc.ProcessGrid(height=2, width=-1)
    torch.manual_seed(0)
    serial = FNO2d(modes=12)
    module = dc.parallelize(deepcopy(serial), grid)
    plain = random_tensor(random.Random(0), (1, 3, 192, 192), torch.float32)
    x = dc.distribute_tensor(plain, grid).requires_grad_()
    weights = sum(p.nbytes for p in serial.parameters())
    for _ in range(2):  # the first calls compare parameters
        with arriving(grid) as forward:
            y = module(x)
        with arriving(grid) as backward:
            y.square().sum().backward()
    most = [
        max(row) for row in zip(*grid.comm.allgather((sum(forward), sum(backward))), strict=True)
    ]
    assert most[0] < 0.4 * plain.nbytes
    assert most[1] - 2 * weights < 0.4 * plain.nbytes

    def step(network: nn.Module, x: Tensor) -> Callable[[], object]:
        return lambda: (network.zero_grad(), network(x).square().sum().backward())

    own = peak_of(lambda: step(module, x)).whole
    alone = peak_of(lambda: step(serial, plain.clone().requires_grad_())).whole
    assert max(grid.comm.allgather(own)) < 1.2 * alone / grid.size


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_within_a_module_keeps_fields_partitioned(mode: Callable) -> None:
    grid = dc.ProcessGrid(height=2, width=-1)
    torch.manual_seed(0)
    serial = FNO2d(modes=3, width=4, layers=2)
    module = dc.parallelize(deepcopy(serial), grid)
    plain = random_tensor(random.Random(0), (1, 3, 24, 24), torch.float32)
    kinds: set[type] = set()
    module.convs[0].register_forward_hook(lambda *call: kinds.add(type(call[-1])))
    with mode():
        x = dc.distribute_tensor(plain, grid)
        for _ in range(17):
            with arriving(grid) as sizes:
                y = module(x)
        assert y.grid_layout == x.grid_layout
        assert deviation(y, serial(plain)) < 1e-5
    assert kinds == {dc.DistTensor}
    assert max(grid.comm.allgather(sum(sizes))) < plain.nbytes


@on_any_grid(60, more=[3, 6])
def test_slices_of_modes_and_their_inverse_equal_serial(case: Case) -> None:
    """Check few modes and many, in several slices, rolled, cropped and padded."""
    shape = [n + 1 for n in case.draw(shapes(2, 4, 6))]
    dims = case.some(range(len(shape)), least=1)
    real = case.flag()
    norm = case.one_of(None, "ortho", "forward")
    shift = case.flag()
    lengths = case.one_of(None, [case.one_of(shape[d], 3, 7) for d in dims])
    x = case.tensor(shape)
    forth, back = (torch.fft.rfftn, torch.fft.irfftn) if real else (torch.fft.fftn, torch.fft.ifftn)
    size = forth(x, s=lengths, dim=dims).shape
    slices = []
    for _ in range(case.one_of(1, 2, 3)):
        picks: list[slice] = [slice(None)] * len(shape)
        for d in dims:
            picks[d] = case.one_of(
                slice(0, case.one_of(1, 2, 3)), slice(-case.one_of(1, 2), None), slice(1, None, 2)
            )
        slices.append(tuple(picks))
    into = case.one_of("plain", "like", "new")

    def call(x: Tensor) -> Tensor:
        x_ft = forth(x if real else torch.complex(x, x * x), s=lengths, dim=dims, norm=norm)
        made = {
            "plain": lambda: torch.zeros(size, dtype=torch.cdouble, device=x.device),
            "like": lambda: torch.zeros_like(x_ft),
            "new": lambda: x_ft.new_zeros(size),
        }[into]()
        if shift:
            x_ft = torch.fft.fftshift(x_ft, dim=dims[:-1] or dims)
        for i, picks in enumerate(slices):
            made[picks] = (2 + i) * x_ft[picks] * x_ft[picks].abs()
        if shift:
            made = torch.fft.ifftshift(made, dim=dims[:-1] or dims)
        space = [x.shape[d] for d in dims] if lengths is None else lengths
        result = back(made, s=space, dim=dims, norm=norm)
        return result if real else torch.view_as_real(result)

    few = case.one_of(1e9, spectra.FEW)
    with mock.patch.object(spectra, "FEW", few):
        case.agrees(call, x, cut=[0])


@pytest.mark.parallel([2, 4])
def test_second_derivatives_of_kept_modes_equal_serial() -> None:
    grid = dc.ProcessGrid(height=2, width=-1)
    rng = random.Random(3)
    plain = random_tensor(rng, (1, 2, 12, 10))
    torch.manual_seed(0)
    layer = SpectralConv2d(2, (2, 2), torch.cdouble)

    def second(x: Tensor, network: Callable[[Tensor], Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(network(x).pow(3).sum(), x, create_graph=True)
        (result,) = torch.autograd.grad(first.pow(2).sum(), x)
        return result

    wanted = second(plain.clone().requires_grad_(), layer)
    module = dc.parallelize(deepcopy(layer), grid)
    with mock.patch.object(spectra, "FEW", 1e9):
        got = second(dc.distribute_tensor(plain, grid).requires_grad_(), module)
    assert deviation(got, wanted) < TOLERANCE


@pytest.mark.parallel([2])
def test_a_pending_transform_keeps_the_values_of_its_time() -> None:
    grid = dc.ProcessGrid(height=-1)
    plain = random_tensor(random.Random(4), (1, 2, 8, 6))

    def by_writes(x: Tensor) -> list[Tensor]:
        x_ft, shifted = torch.fft.rfft2(x), torch.fft.fftshift(torch.fft.fft2(x), dim=2)
        corner = x_ft[..., :1, :1]
        x.mul_(2)
        x[:, :, 0] = 1
        before = x_ft + 0
        kept = torch.zeros_like(x_ft)
        kept[..., :2, :2] = value = x_ft[..., :2, :2] * 3
        value.zero_()
        kept[..., 1:3, :2] += 1
        x_ft[..., :1, :1] = 7
        x_ft[..., 1:2].imag.add_(corner.real)
        return [before, x_ft, shifted, corner, kept, torch.fft.irfft2(kept)]

    with mock.patch.object(spectra, "FEW", 1e9), torch.no_grad():
        wanted = by_writes(plain.clone())
        got = by_writes(dc.distribute_tensor(plain, grid))
    assert [deviation(*pair) < TOLERANCE for pair in zip(got, wanted, strict=True)] == [True] * 6


@pytest.mark.parallel([2])
def test_metadata_of_a_pending_transform_moves_nothing() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.ones(1, 4, 8, 8), grid).requires_grad_()
    with arriving(grid) as sizes:
        x_ft = torch.fft.rfft2(x)
        kept = torch.zeros_like(x_ft)
        assert (x_ft.shape, x_ft.dtype) == ((1, 4, 8, 5), torch.cfloat)
        assert x_ft.requires_grad and not x_ft.is_leaf and x_ft.is_complex()
        assert not kept.requires_grad and kept.is_leaf and kept.grid_layout == x_ft.grid_layout
        assert "pending, shape=(1, 4, 8, 5)" in repr(x_ft) and x_ft.grad is None
        node = x_ft.grad_fn
        assert node is not None and kept.grad_fn is None
    assert not sizes
    assert node == x_ft.shard.grad_fn == x_ft.grad_fn


@pytest.mark.parallel([2])
def test_a_pending_transform_is_recorded_as_when_it_was_called() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.ones(1, 4, 8, 8), grid)
    before = torch.fft.rfft2(x)
    x.requires_grad_()
    after = torch.fft.rfft2(x)
    with torch.no_grad():
        assert not after[..., :1, :1].requires_grad
        assert after.requires_grad
    assert after[..., :1, :1].requires_grad and (after + 0).requires_grad
    assert not before[..., :1, :1].requires_grad and not (before + 0).requires_grad


@pytest.mark.parallel([2])
def test_a_transform_of_a_block_that_the_program_wrote_to_raises() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.ones(1, 4, 8, 8), grid)
    block = x.to_local()
    x_ft = torch.fft.rfft2(x)
    block.mul_(2)
    assert "pass x.clone()" in raised_everywhere(RuntimeError, lambda: x_ft[..., :1, :1])


@pytest.mark.parallel([2])
def test_a_rank_that_keeps_a_pending_transform_alone_sends_nothing_at_a_write() -> None:
    grid = dc.ProcessGrid(height=-1)
    plain = random_tensor(random.Random(4), (1, 2, 8, 6))
    x = dc.distribute_tensor(plain, grid).clone()
    kept = [torch.fft.rfft2(x), torch.fft.fft2(x[:, :, 2:])]
    if grid.rank:
        del kept[0]
    with arriving(grid) as sizes:
        x.mul_(2)
        x.to_local().zero_()
    assert not sizes
    assert (
        deviation(kept[-1][..., :2, :2], torch.fft.fft2(plain[:, :, 2:])[..., :2, :2]) < TOLERANCE
    )
    assert not x.full_tensor().any()


@pytest.mark.parallel([2])
def test_a_pending_transform_shifted_under_no_grad_is_not_recorded() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.ones(1, 4, 8, 8), grid).requires_grad_()
    x_ft = torch.fft.rfft2(x)
    kept = torch.zeros_like(x_ft)
    kept[..., :2, :2] = x_ft[..., :2, :2]
    with torch.no_grad():
        shifted = [torch.fft.fftshift(y, dim=-2) for y in (x_ft, kept)]
    assert [y.requires_grad for y in shifted] == [False, False]
    assert not torch.fft.irfft2(shifted[1]).requires_grad
    assert torch.fft.fftshift(x_ft, dim=-2).requires_grad
