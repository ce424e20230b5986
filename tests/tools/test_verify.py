"""`verify` agrees with networks that are right, and names the layer that is wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import distconv as dc
import distconv.layers
from tests.support.published import NETWORKS
from tests.support.serial import noted

GRIDS = {1: [{}], 2: [{"height": 2}, {"sample": 2}], 4: [{"height": 2, "width": 2}]}


@pytest.fixture(autouse=True)
def alike() -> None:
    """Let every rank draw the same random numbers."""
    torch.manual_seed(0)


CHOSEN = ["ResNet", "U-Net 2-D, instance norm", "V-Net", "DeepLab", "ConvNeXt"]


def module_and_input(name: str) -> tuple[nn.Module, Tensor]:
    make, sample = NETWORKS[name]
    torch.manual_seed(0)
    return make().double(), torch.randn(4, *sample, dtype=torch.float64)


@pytest.mark.parallel(list(GRIDS))
@pytest.mark.parametrize("name", CHOSEN)
def test_published_networks_agree_in_every_row(name: str) -> None:
    module, x = module_and_input(name)
    for extents in GRIDS[MPI.COMM_WORLD.size]:
        with noted(extents):
            result = dc.verify(module, x, dc.ProcessGrid(**extents), show=False)
            assert result.ok, result.first_deviation
            assert {row.kind for row in result.rows} >= {"output", "gradient"}
            gradients = {row.layer for row in result.rows if row.kind == "gradient"}
            assert gradients == {"input", *(key for key, _ in module.named_parameters())}
            buffers = {row.layer for row in result.rows if row.kind == "buffer"}
            assert buffers == {key for key, _ in module.named_buffers()}


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_of_shorter_types_is_no_deviation(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 3, 3))
    x = torch.randn(2, 2, 17, 12, dtype=dtype)
    result = dc.verify(module.to(dtype), x, dc.ProcessGrid(height=-1), show=False)
    assert result.ok, result.first_deviation
    assert result.tolerance == (1e-4 if dtype == torch.float32 else 0.5)


class LocalConv(nn.Conv2d):
    """A convolution that forgets the halo."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, dc.DistTensor):
            return super().forward(x)
        return dc.DistTensor.from_local(super().forward(x.to_local()), x.grid, x.grid_layout)


class HalfTheGradient(nn.Module):
    """A layer that computes right, but passes on a wrong gradient on a grid."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2 + x.detach() / 2 if isinstance(x, dc.DistTensor) else x * 1


class ForgetsToCount(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if isinstance(x, dc.DistTensor):
            self.running_mean *= 2
        return y


class OtherShape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[..., :-1] if isinstance(x, dc.DistTensor) else x


WRONG: dict[str, tuple[nn.Module, str, str]] = {
    "local statistics": (distconv.layers.BatchNorm2d(4, statistics="local"), "1.0", "output"),
    "no halo": (LocalConv(4, 4, 3, padding=1), "1.0", "output"),
    "gradient": (HalfTheGradient(), "0.bias", "gradient"),
    "running statistics": (ForgetsToCount(4), "1.0.running_mean", "buffer"),
    "shape": (OtherShape(), "1.0", "output"),
}


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("case", WRONG)
def test_the_first_layer_that_is_wrong_is_named(case: str) -> None:
    wrong, name, kind = WRONG[case]
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Sequential(wrong, nn.ReLU(True)), nn.Conv2d(4, 2, 1)
    ).double()
    x = torch.randn(2, 2, 12, 9, dtype=torch.float64)
    result = dc.verify(module, x, dc.ProcessGrid(height=-1), show=False)
    first = result.first_deviation
    assert first is not None and not result.ok
    assert (first.layer, first.kind) == (name, kind)
    assert f"first deviation: {name} ({kind})" in str(result)


@pytest.mark.parallel([2])
def test_a_network_that_amplifies_rounding_is_not_mistaken_for_a_wrong_one() -> None:
    def network(statistics: str) -> nn.Module:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1, bias=False),
                nn.ReLU(),
                distconv.layers.BatchNorm2d(8, statistics=statistics),
            )
            for _ in range(14)
        ]
        return nn.Sequential(*blocks)

    x = torch.randn(1, 8, 2, 2)
    result = dc.verify(network("global"), x, {"height": 2}, show=False)
    assert result.ok and max(row.difference for row in result.rows) > result.tolerance
    assert "effect of rounding on the serial program" in str(result)
    wrong = dc.verify(network("local"), x, {"height": 2}, show=False)
    assert wrong.first_deviation is not None and wrong.first_deviation.layer == "0.2"


@pytest.mark.parallel([2])
def test_the_running_mean_of_what_a_norm_has_centred_is_no_deviation() -> None:
    layers = nn.BatchNorm2d(3), nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8)
    x = torch.randn(2, 3, 9, 7, dtype=torch.float64)
    result = dc.verify(nn.Sequential(*layers).double(), x, {"height": 2}, show=False)
    means = [row for row in result.rows if row.layer == "2.running_mean"]
    assert result.ok and means[0].difference <= result.tolerance


@pytest.mark.parallel([2])
def test_what_computes_in_inference_mode_is_compared() -> None:
    class Counting(nn.Module):
        @torch.inference_mode()
        def forward(self, x: Tensor) -> Tensor:
            return (x > 0).sum((2, 3))

    x = torch.randn(2, 3, 9, 7)
    result = dc.verify(Counting(), x, {"height": 2}, show=False)
    assert result.ok and [row.kind for row in result.rows] == ["output"]


@pytest.mark.parallel([2])
def test_labels_among_the_inputs_are_not_shaken() -> None:
    class Weighted(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            if labels.max() > 1:
                raise ValueError("labels are 0 or 1")
            return (x * labels).sum()

    x = torch.randn(2, 3, 9, 7, dtype=torch.float64)
    labels = torch.randint(2, x.shape).double()
    assert dc.verify(Weighted(), [x, labels], {"height": 2}, show=False).ok


@pytest.mark.parallel([2])
def test_a_layer_that_is_refused_is_named_with_the_reason(capsys) -> None:
    class Refused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.as_strided((2,), (1,))

    module = nn.Sequential(nn.ReLU(), nn.Sequential(Refused()), nn.ReLU())
    result = dc.verify(module, torch.randn(2, 1, 6, 6), {"height": 2})
    first = result.first_deviation
    assert first is not None and (first.layer, first.kind) == ("1.0", "refused")
    assert "as_strided" in first.note
    printed = capsys.readouterr().out
    assert printed == (f"{result}\n" if MPI.COMM_WORLD.rank == 0 else "")
    assert "1.0 is unsupported" in str(result)


class Branches(nn.Module):
    """A layer called twice, shared parameters, two inputs, a dictionary, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.twin = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.twin.weight = self.conv.weight
        self.relu, self.unused = nn.ReLU(True), nn.Linear(2, 2)

    def forward(self, x: Tensor, index: Tensor) -> dict[str, Any]:
        self.relu(x)
        a = self.relu(self.conv(self.conv(x))) + self.twin(x)
        a += index
        return {"a": a, "peak": (a.amax((2, 3)), a.flatten(2).argmax(2)), "n": 3}


@pytest.mark.parallel([1, 2, 3])
def test_calls_inputs_and_results_of_any_structure_are_compared() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 9, 8, dtype=torch.float64)
    index = torch.arange(8).expand(3, 2, 9, 8)
    result = dc.verify(Branches().double(), (x, index), {"height": MPI.COMM_WORLD.size}, show=False)
    assert result.ok, result.first_deviation
    assert [row.layer for row in result.rows] == [
        *("relu", "conv", "conv (call 2)", "relu (call 2)", "twin"),
        *("Branches", "Branches[1]", "Branches[2]"),
        *("twin.bias", "conv.bias", "conv.weight", "input"),
    ]


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parallel([1, 2])
def test_layers_that_the_backward_pass_calls_again_are_compared_once() -> None:
    module = Checkpointed(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3))
    x = torch.randn(1, 2, 12, 9)
    result = dc.verify(module, x, {"height": MPI.COMM_WORLD.size}, show=False)
    assert result.ok, result.first_deviation
    outputs = [row.layer for row in result.rows if row.kind == "output"]
    assert outputs == ["0", "1", "2", "Checkpointed"]


@pytest.mark.parallel([2])
def test_random_layers_are_put_aside_or_pointed_out() -> None:
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, self.training)

    x = torch.randn(2, 2, 8, 8)
    result = dc.verify(nn.Sequential(nn.Conv2d(2, 2, 3), nn.Dropout2d()), x, {"height": 2})
    assert result.ok and "1 ran in eval mode" in str(result)
    result = dc.verify(nn.Sequential(nn.Tanh(), Drops(), nn.Tanh()), x, {"height": 2})
    assert "1 draws random numbers" in str(result)


@pytest.mark.parallel([2])
def test_module_gradients_and_random_state_stay_as_they_are() -> None:
    torch.manual_seed(MPI.COMM_WORLD.rank)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Dropout())
    x = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    module(x).sum().backward()
    before = copy.deepcopy(module.state_dict())
    gradient = module[0].weight.grad.clone()
    state, moved = torch.get_rng_state(), dc.redistributions()
    assert dc.verify(module, x, {"height": 2}, show=False).ok  # with rank 0's parameters
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    assert torch.equal(module[0].weight.grad, gradient) and module[2].training
    assert not module[0]._forward_hooks and dc.redistributions() == moved
    model = dc.parallelize(module, dc.ProcessGrid(height=2))
    assert dc.verify(model, x, {"height": 2}, backward=False, show=False).ok


@pytest.mark.parallel([2])
def test_bad_arguments_raise_on_every_rank() -> None:
    conv, x, grid = nn.Conv2d(2, 3, 3), torch.zeros(1, 2, 8, 8), dc.ProcessGrid(height=2)
    rank = MPI.COMM_WORLD.rank
    odd = nn.ReLU() if rank else print
    cases: list[tuple[Any, Any, Any, dict[str, Any], str]] = [
        (odd, x, grid, {}, r"is not a torch.nn.Module \(rank 0\)"),
        (conv, dc.distribute_tensor(x, grid), grid, {}, "pass the whole plain tensor"),
        (conv, [1.0], grid, {}, "the input is a float"),
        (conv, x + rank, grid, {}, "the input of rank 1 differs from rank 0's"),
        (conv, x, grid, {"seed": rank}, "pass the same on every rank"),
        (conv, x, {"height": 3}, {}, "does not divide 2 ranks"),
        (conv, x, grid, {"layout": [None, None]}, "2 layouts for 1 inputs"),
        (nn.LazyConv2d(2, 3), x, grid, {}, "without shape yet"),
        (conv, x[:, :1], grid, {}, r"\(Conv2d\) raised in the serial program.*expected input"),
    ]
    for module, input, where, options, message in cases:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            dc.verify(module, input, where, show=False, **options)


@pytest.mark.parallel([2])
def test_an_error_on_the_grid_alone_names_the_layer() -> None:
    class Unready(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if isinstance(x, dc.DistTensor):
                raise KeyError("table")
            return x

    with pytest.raises(RuntimeError, match=r"1 \(Unready\) raised on the grid.*KeyError"):
        dc.verify(nn.Sequential(nn.ReLU(), Unready()), torch.zeros(2, 2), {"sample": 2})


@pytest.mark.parallel([2])
def test_what_rounding_blurs_is_not_a_licence_for_anything() -> None:
    class Sensitive(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x * 1e9).sin()
            return y * 1.5 if isinstance(y, dc.DistTensor) else y

    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Sensitive())
    generator = torch.Generator().manual_seed(0)
    result = dc.verify(
        module, torch.randn(2, 3, 8, 8, generator=generator), {"height": 2}, show=False
    )
    assert not result.ok


@pytest.mark.parallel([1, 2])
def test_gradients_that_norms_over_few_elements_cancel_are_judged_by_float64() -> None:
    for seed in (100, 130, 146):  # in which the serial gradient of a bias is 0, and ours is not
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Conv2d(3, 3, 3, padding=1)]
        for _ in range(1 + seed % 5):
            norm = nn.InstanceNorm2d(3, affine=True)
            layers += [norm, nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1)]
        module, x = nn.Sequential(*layers), 1 + 0.01 * torch.randn(2, 3, 2, 1)
        result = dc.verify(module, x, dc.ProcessGrid(sample=-1), show=False)
        assert result.ok, (seed, result.first_deviation)


@pytest.mark.parallel([1, 2])
def test_what_is_wrong_in_float32_alone_is_a_deviation() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            wrong = isinstance(x, dc.DistTensor) and x.dtype == torch.float32
            return x * 1.01 if wrong else x

    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Wrong(), nn.Conv2d(4, 4, 1))
    result = dc.verify(module, torch.randn(2, 3, 9, 7), dc.ProcessGrid(sample=-1), show=False)
    assert result.first_deviation is not None and result.first_deviation.layer == "2"


@pytest.mark.parallel([2])
def test_modules_that_differ_between_ranks_are_refused_on_all() -> None:
    grid = dc.ProcessGrid(height=2)
    x = torch.ones(2, 4, 8, 8)
    with pytest.raises(ValueError, match="structure or mode"):
        dc.verify(nn.BatchNorm2d(4).train(grid.rank == 0), x, grid)
    with pytest.raises(ValueError, match="structure or mode"):
        dc.verify(nn.Conv2d(4, 4, 3, stride=1 + grid.rank), x, grid)
