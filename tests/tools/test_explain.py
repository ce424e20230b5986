"""The plan that `explain` makes of a module agrees with a real run, and it needs no ranks."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import distconv as dc
from distconv.comm.ledger import trace_movements
from tests.support.published import NETWORKS, some_of
from tests.support.serial import noted, random_tensor

GRIDS = {
    1: [{}],
    2: [{"height": 2}, {"channel": 2}],
    3: [{"width": 3}],
    4: [{"sample": 2, "height": 2}, {"height": 2, "width": 2}, {"channel": 2, "filter": 2}],
}

SLACK = {
    "DeepLab": 0.02,
    "SegResNet": 0.02,
    "U-Net 2-D, group norm": 0.003,
    "U-Net 2-D, instance norm": 0.003,
}
"""Without elements, torch gives the short lists of weights of linear interpolation other strides,
and a convolution's result the memory format of its input alone, where a kernel on elements also
looks at the weight; statistics of a few more channels are kept for it then."""


def kept_by(module: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    """Return the bytes that autograd keeps in a call, without the parameters, and the result."""
    storages = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        result = module(x)
    for known in (*module.parameters(), *module.buffers()):
        storages.pop(known.untyped_storage().data_ptr(), None)
    return sum(s.nbytes() for s in storages.values()), result


def told_as_it_runs(
    module: nn.Module, x: Tensor, slack: float, grids: Sequence[dict[str, int]]
) -> None:
    """Assert that the plan of `explain` for a module on some grids is that of a real run."""
    kept_serially, _ = kept_by(module, x)
    for extents in grids:
        grid = dc.ProcessGrid(**extents)
        plan = dc.explain(module, tuple(x.shape), grid, rank=grid.rank, show=False)
        assert plan.refusal is None
        model = dc.parallelize(copy.deepcopy(module), grid)
        with noted(extents), trace_movements() as movements:
            kept, result = kept_by(model, dc.distribute_tensor(x, grid))
            assert kept == pytest.approx(plan.kept_bytes, rel=slack)
            own = [m for m in movements if not m.redistributes and not m.plan.identity]
            assert [m.bytes for m in own] == [h.bytes for row in plan.layers for h in row.halos]
            moved = [
                (m.operator, m.source, m.target, m.bytes) for m in movements if m.redistributes
            ]
            assert moved == [
                (r.operator, r.source, r.target, r.bytes)
                for row in plan.layers
                for r in row.redistributions
            ]
            last = [row for row in plan.layers if row.shape is not None][-1]
            assert last.shape == tuple(result.shape) and last.layout == result.grid_layout
            assert last.local_shape == tuple(result.shard.shape)
            assert kept_serially == plan.serial_kept_bytes
            assert plan.parameter_bytes == sum(p.nbytes for p in module.parameters())


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("name", NETWORKS)
def test_halos_bytes_layouts_and_kept_memory_are_those_of_a_real_run(name: str) -> None:
    make, sample = NETWORKS[name]
    torch.manual_seed(0)
    module = make()
    x = random_tensor(random.Random(name), (2, *sample), torch.float32)
    module(x)  # gives lazy layers their shape
    grids = some_of(GRIDS[MPI.COMM_WORLD.size], list(NETWORKS).index(name), 1)
    told_as_it_runs(module, x, SLACK.get(name, 0), grids)


@pytest.mark.parallel(list(GRIDS))
@pytest.mark.parametrize("method", ["assembled", "overlapped"])
def test_both_methods_are_told_as_they_run(method: str) -> None:
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.MaxPool2d(3, 2, 1),
        nn.ConvTranspose2d(4, 4, 4, 2, 1),
        nn.AvgPool2d(3, 1, 1, count_include_pad=False),
    )
    x = random_tensor(random.Random(0), (2, 2, 32, 24), torch.float32)
    with dc.method(method):
        told_as_it_runs(module, x, 0, GRIDS[MPI.COMM_WORLD.size])


def test_halo_widths_are_those_of_the_kernel() -> None:
    module = nn.Sequential(
        nn.Conv2d(2, 4, (5, 3), padding=(2, 1)),
        nn.Conv2d(4, 4, 3, stride=2, padding=1),
        nn.Conv2d(4, 4, 1),
        nn.MaxPool2d(2),  # of blocks whose windows others do not share
    )
    plan = dc.explain(module, (1, 2, 64, 64), {"height": 4, "width": 2}, rank=2, show=False)
    widths = [[halo.widths for halo in layer.halos] for layer in plan.layers]
    assert widths == [
        [{"height": (2, 2), "width": (0, 1)}],
        [{"height": (1, 0), "width": (0, 0)}],
        [],
        [],
    ]
    row, block = 2 * 32, 2 * 16
    assert plan.layers[0].halo_bytes == 4 * (4 * row + block + 2 * 4)
    assert [layer.local_shape for layer in plan.layers[:2]] == [(1, 4, 16, 32), (1, 4, 8, 16)]


def test_a_grid_of_4096_ranks_is_planned_by_one_process() -> None:
    module = nn.Sequential(nn.Conv2d(18, 64, 5, 2, 2), nn.BatchNorm2d(64), nn.ReLU())
    plan = dc.explain(module, (64, 18, 2048, 2048), {"height": 64, "width": 64}, show=False)
    assert plan.rank == 32 * 64 + 32
    assert plan.layers[0].local_shape == (64, 64, 16, 16)
    assert plan.layers[0].halos[0].widths == {"height": (2, 1), "width": (2, 1)}
    assert plan.serial_kept_bytes / plan.kept_bytes > 3000
    dc.explain(module, (64, 18, 2048, 2048), {"height": 64, "width": 64}, rank=4095, show=False)


class Mixed(nn.Module):
    """Functions between layers, shared and repeated layers, and a dictionary as the result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(2, 1, 1))
        self.same = self.conv

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        a = self.same(self.conv(x)) * self.scale
        a = F.interpolate(torch.cat([a, y], 2), scale_factor=2)
        mask = torch.ones(a.shape[-1])
        return {"a": a * mask, "b": (a.redistribute(dc.Layout()), 1)}


def test_functions_between_layers_have_lines_under_the_module_that_calls_them() -> None:
    shapes = [(2, 2, 8, 6), (2, 2, 5, 6)]
    plan = dc.explain(Mixed(), shapes, {"height": 2}, rank=0, show=False)
    names = [(row.name, row.kind) for row in plan.layers]
    assert names == [
        ("conv", "Conv2d"),
        ("conv (call 2)", "Conv2d"),
        ("Mixed", "mul"),
        ("Mixed", "cat"),
        ("Mixed", "interpolate"),
        ("Mixed", "mul"),
        ("Mixed", "redistribute"),
        ("Mixed", "Mixed"),
    ]
    assert sum(row.parameter_bytes for row in plan.layers) == plan.parameter_bytes
    (moved,) = plan.layers[-2].redistributions
    assert moved.target == dc.Layout() and moved.bytes == 4 * 2 * 2 * 13 * 12


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * int((x > 0).sum().item())


def test_a_layer_that_is_refused_ends_the_table() -> None:
    class Refused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.as_strided((2,), (1,))

    module = nn.Sequential(nn.ReLU(), nn.Sequential(Refused()), nn.ReLU())
    plan = dc.explain(module, (1, 1, 8, 8), {"height": 2}, show=False)
    assert [row.name for row in plan.layers] == ["0", "1.0"]
    assert plan.layers[-1].refusal == plan.refusal
    assert "as_strided" in plan.refusal and "1.0 is unsupported" in str(plan)


def test_a_batch_norm_without_momentum_asks_for_no_elements() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None))
    plan = dc.explain(module, (2, 3, 8, 8), {"height": 2}, show=False)
    assert [row.name for row in plan.layers] == ["0", "1"]
    assert module[1].momentum is None


def test_code_that_asks_for_elements_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"1 \(Counts\) raised.*without values"):
        dc.explain(nn.Sequential(nn.ReLU(), Counts()), (2, 3), {"sample": 2}, show=False)


def test_the_module_and_the_state_of_the_program_stay_as_they_are(capsys) -> None:
    class Remembers(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last.sum(1).flatten()

    module = Remembers(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Dropout())
    state = copy.deepcopy(module.state_dict())
    random_state = torch.get_rng_state()
    counted = dc.redistributions()
    plan = dc.explain(module, (4, 2, 9, 9), {"height": 3})
    assert capsys.readouterr().out == f"{plan}\n"
    assert not hasattr(module, "last") and not module._forward_hooks
    assert all(torch.equal(x, state[name]) for name, x in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert dc.redistributions() == counted


def test_bad_arguments_are_named() -> None:
    conv = nn.Conv2d(2, 3, 3)
    cases: list[tuple[Any, Any, Any, dict[str, Any], str]] = [
        (print, (1, 2, 8, 8), {}, {}, "is not a torch.nn.Module"),
        (conv, (1, 2, 8, 8), {"hight": 2}, {}, "'hight' is not an axis"),
        (conv, (1, 2, 8, 8), {"height": -1}, {}, "give every axis its number of ranks"),
        (conv, (1, 2, 8, 8), {"height": 2}, {"rank": 2}, "rank=2 is not on a grid of 2"),
        (conv, (1, -2, 8, 8), {}, {}, "is not a shape"),
        (conv, [(1, 2, 8, 8)], {}, {"dtype": [torch.float32] * 2}, "2 entries for 1 inputs"),
        (nn.LazyConv2d(2, 3), (1, 2, 8, 8), {}, {}, "LazyConv2d has no shape yet"),
        (conv, (1, 5, 8, 8), {}, {}, r"Conv2d \(Conv2d\) raised RuntimeError"),
    ]
    for module, shape, grid, options, message in cases:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            dc.explain(module, shape, grid, show=False, **options)
    model = dc.parallelize(conv, dc.ProcessGrid(height=-1))
    with pytest.raises(ValueError, match="before parallelize"):
        dc.explain(model, (1, 2, 8, 8), {})


class _Of(nn.Module):
    def __init__(self, function: Any):
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Any:
        return self._function(x)


@pytest.mark.parametrize(
    "function", [lambda x: x.softmax(2), torch.max, torch.argmax, lambda x: x.prod(2)]
)
def test_what_looks_for_nan_or_infinities_is_planned_without_elements(function: Any) -> None:
    plan = dc.explain(_Of(function), (1, 2, 8, 8), {"height": 2}, show=False)
    assert plan.refusal is None


def test_offloaded_activations_are_explained_as_of_gpus() -> None:
    found = dc.explain(nn.Conv2d(1, 2, 3), (1, 1, 8, 8), {"height": 2}, show=False, offload=True)
    assert [layer.kind for layer in found.layers] == ["Conv2d"]
