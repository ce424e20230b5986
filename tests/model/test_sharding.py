"""Sharded parameters: each rank keeps its blocks, and results are those of whole parameters."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

import distconv as dc
from distconv import DistTensor
from distconv.tensor.dispatch import RULES
from tests.support.serial import deviation, random_grid, random_tensor, same_gradients, same_state

WORLD = MPI.COMM_WORLD


class Net(nn.Module):
    """Every kind of layer with weights to cut, a tied weight, and a weight without gradient."""

    def __init__(self) -> None:
        super().__init__()
        # A bias before a norm has no gradient but rounding errors.
        self.conv = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.down = nn.Conv2d(6, 7, 3, stride=2, padding=1, bias=False)
        self.grouped = nn.Conv2d(7, 7, 3, padding=1, groups=7)
        self.up = nn.ConvTranspose2d(7, 5, 2, stride=2)
        self.tied = nn.Conv2d(3, 6, 3, padding=1)
        self.tied.weight = self.conv.weight
        self.frozen = nn.Conv2d(5, 5, 1).requires_grad_(False)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x))) + self.tied(x)
        x = self.frozen(self.up(self.grouped(self.down(x))))
        return self.head(x.mean((2, 3)))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def grids(seed: int, n: int = 3) -> list[dc.ProcessGrid]:
    """Return grids of which some cut channels."""
    rng = random.Random(seed)
    axes = ("channel", "sample", "channel", "height")
    return [dc.ProcessGrid(channel=-1), *(random_grid(rng, axes) for _ in range(n - 1))]


def sharded(grid: dc.ProcessGrid, **options: Any) -> nn.Module:
    return dc.parallelize(net(WORLD.rank), grid, shard_parameters=True, **options)


def batch(seed: int) -> Tensor:
    return random_tensor(random.Random(seed), (4, 3, 8, 6))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, clip: Any = None) -> Any:
    optimizer.zero_grad()
    F.log_softmax(model(x), 1).square().mean().backward()
    norm = clip(model.parameters(), 0.05) if clip is not None else None
    optimizer.step()
    return norm


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "SGD on lists": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "AdamW on lists": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True, fused=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, 0.01, fused=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "Rprop on lists": lambda p: torch.optim.Rprop(p, 0.01, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
    "Adafactor on lists": lambda p: torch.optim.Adafactor(p, 0.1, foreach=True),
}


ON_FOUR = ["SGD, fused", "AdamW on lists", "Adafactor", "Adafactor on lists"]


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("name", OPTIMIZERS if WORLD.size == 2 else ON_FOUR)
def test_sharded_parameters_train_as_serially(name: str) -> None:
    make = OPTIMIZERS[name]
    for grid in grids(0, 2):
        model, serial = sharded(grid), net()
        same_state(model, serial, 0.0)
        mine, its = make(model.parameters()), make(serial.parameters())
        for seed in range(3):
            step(model, mine, dc.distribute_tensor(batch(seed), grid))
            step(serial, its, batch(seed))
        same_state(model, serial)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_and_its_state_are_the_serial_ones(search: str | None) -> None:
    def trained(model: nn.Module, x: Tensor, state: Any = None) -> Any:
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, 2, line_search_fn=search)
        if state is not None:
            dc.load_full_state_dict(optimizer, copy.deepcopy(state))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.log_softmax(model(x), 1).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return dc.full_state_dict(optimizer)

    for grid in grids(2, 1):
        model, serial = sharded(grid), net()
        x = dc.distribute_tensor(batch(0), grid)
        state, expected = trained(model, x), trained(serial, batch(0))
        same_state(model, serial)
        assert deviation(state["state"][0]["d"], expected["state"][0]["d"]) <= 1e-8
        trained(model, x, state)
        trained(serial, batch(0), state)
        same_state(model, serial, 1e-8)


@pytest.mark.parallel([2, 4])
def test_a_rank_holds_its_share_of_weights_gradients_and_optimizer_state() -> None:
    grid = dc.ProcessGrid(channel=-1)
    torch.manual_seed(0)
    layers = [nn.Conv2d(12, 12, 3, padding=1, bias=False) for _ in range(3)]
    model = dc.parallelize(nn.Sequential(*layers), grid, shard_parameters=True)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, dc.distribute_tensor(torch.randn(2, 12, 4, 4), grid))
    whole = 3 * 12 * 12 * 9 * 4
    weights = [p.shard for p in model.parameters()]
    gradients = [p.grad.shard for p in model.parameters()]
    moments = [optimizer.state[p][name].shard for p in model.parameters() for name in MOMENTS]
    for blocks, copies in ((weights, 1), (gradients, 1), (moments, 2)):
        memory = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in blocks}
        # A bucket of gradients has a number more for each.
        assert sum(memory.values()) <= copies * whole // grid.size + 3 * 4


MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("name", ["Adam", "Adafactor"])
def test_states_go_from_any_grid_to_any_other_and_to_serial_torch(name: str) -> None:
    make = OPTIMIZERS[name]
    first, second, *_ = grids(1)
    model = sharded(first)
    optimizer = make(model.parameters())
    step(model, optimizer, dc.distribute_tensor(batch(0), first))
    states = dc.full_state_dict(model), dc.full_state_dict(optimizer)

    serial = net(1)
    targets = [serial, sharded(first), sharded(second), dc.parallelize(net(1), second)]
    optimizers = [make(target.parameters()) for target in targets]
    for target, its in zip(targets, optimizers, strict=True):
        dc.load_full_state_dict(target, copy.deepcopy(states[0]))
        dc.load_full_state_dict(its, copy.deepcopy(states[1]))
        same_state(target, serial, 0.0)
    step(serial, optimizers[0], batch(1))
    for target, its, grid in zip(targets[1:], optimizers[1:], (first, second, second), strict=True):
        step(target, its, dc.distribute_tensor(batch(1), grid))
        same_state(target, serial)


@pytest.mark.parallel([1, 2])
def test_a_module_takes_the_plain_state_by_torch_s_own_method() -> None:
    model, serial = sharded(dc.ProcessGrid(channel=-1)), net(5)
    model.load_state_dict(serial.state_dict())
    same_state(model, serial, 0.0)
    state: Any = dc.full_state_dict(model)
    assert state._metadata == serial.state_dict()._metadata  # type: ignore[attr-defined]
    state["down.weight"] = state["down.weight"][:3]
    with pytest.raises(RuntimeError, match="size mismatch for down.weight"):
        dc.load_full_state_dict(model, state)


CLIPS: dict[str, Callable[..., Tensor]] = {
    "distconv": dc.clip_grad_norm_,
    "torch": nn.utils.clip_grad_norm_,
    "torch on lists": partial(nn.utils.clip_grad_norm_, foreach=True),
}


@pytest.mark.parallel([4])
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("name", CLIPS)
def test_gradients_are_clipped_by_their_true_norm(name: str, order: float) -> None:
    def clip(parameters: Any, limit: float) -> Tensor:
        return CLIPS[name](parameters, limit, order)

    def torch_s(parameters: Any, limit: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, limit, order)

    for grid in grids(2, 2):
        model, serial = sharded(grid), net()
        mine, its = OPTIMIZERS["SGD"](model.parameters()), OPTIMIZERS["SGD"](serial.parameters())
        for seed in range(2):
            norm = step(model, mine, dc.distribute_tensor(batch(seed), grid), clip)
            expected = step(serial, its, batch(seed), torch_s)
            assert abs(norm.item() / expected.item() - 1) <= 1e-10
        same_state(model, serial)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("lists", [None, True])
def test_torch_s_functions_of_all_gradients_take_sharded_ones(lists: bool | None) -> None:
    for grid in grids(5):
        model, serial = sharded(grid), net()
        for m, x in ((model, dc.distribute_tensor(batch(0), grid)), (serial, batch(0))):
            F.log_softmax(m(x), 1).square().mean().backward()
        mine, its = (
            [p.grad for p in m.parameters() if p.grad is not None] for m in (model, serial)
        )
        for order in (0.0, 0.5, 3.0):
            norms = [nn.utils.get_total_norm(g, order, foreach=lists) for g in (mine, its)]
            assert abs(norms[0].item() / norms[1].item() - 1) <= 1e-10
        middle = torch.cat([g.flatten().abs() for g in its]).median().item()
        for m in (model, serial):
            nn.utils.clip_grad_value_(m.parameters(), middle, lists)
        same_gradients(model, serial)
        next(p for p in model.parameters() if p.grad is not None).grad.fill_(torch.nan)
        with pytest.raises(RuntimeError, match="is non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, 2.0, True, lists)


@pytest.mark.parallel([1, 4])
def test_blocks_without_elements_have_no_norm() -> None:
    order = float("inf")
    grid = dc.ProcessGrid(channel=-1)
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Conv2d(2, 3, 1)).double()
    model = dc.parallelize(copy.deepcopy(serial), grid, shard_parameters=True)
    serial(batch(0)).square().mean().backward()
    model(dc.distribute_tensor(batch(0), grid)).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(serial.parameters(), 1.0, order)
    norm = dc.clip_grad_norm_(model.parameters(), 1.0, order)
    assert deviation(norm, expected.detach()) <= 1e-10
    with pytest.raises(ValueError, match="norm_type=0.0 is not positive"):
        dc.clip_grad_norm_(model.parameters(), 1.0, 0)


@pytest.mark.parallel([1, 2, 4])
def test_gradients_on_demand_are_whole() -> None:
    for grid in [dc.ProcessGrid(channel=-1), *grids(4), dc.ProcessGrid(sample=-1)]:
        model, serial = sharded(grid), net()
        weights = [p for p in model.parameters() if p.requires_grad]
        its = [p for p in serial.parameters() if p.requires_grad]
        loss = model(dc.distribute_tensor(batch(0), grid)).square().mean()
        expected = torch.autograd.grad(serial(batch(0)).square().mean(), its)
        for mine, yours in zip(torch.autograd.grad(loss, weights), expected, strict=True):
            assert deviation(mine, yours) <= 1e-10


@pytest.mark.parallel([1, 2, 4])
def test_hooks_of_sharded_parameters_get_whole_gradients_and_may_replace_them() -> None:
    seen: dict[bool, list[Tensor]] = {False: [], True: []}

    def hook(x: Tensor, is_serial: bool) -> Tensor:
        seen[is_serial].append(x.detach().clone())
        return 2 * x + 1

    for grid in [dc.ProcessGrid(channel=-1), *grids(5)]:
        model, serial = sharded(grid), net()
        for m, is_serial in ((model, False), (serial, True)):
            m.down.weight.register_hook(partial(hook, is_serial=is_serial))
        model(dc.distribute_tensor(batch(0), grid)).square().mean().backward()
        serial(batch(0)).square().mean().backward()
        assert deviation(model.down.weight.grad, serial.down.weight.grad) <= 1e-10
    assert len(seen[False]) == len(seen[True])
    if WORLD.size == 1:
        return
    for mine, yours in zip(seen[False], seen[True], strict=True):
        assert deviation(mine, yours) <= 1e-10


@pytest.mark.parallel([1, 2, 3])
def test_an_optimizer_made_before_trains_sharded_parameters() -> None:
    grid = dc.ProcessGrid(channel=-1)
    model, serial = net(), net()
    mine, its = (OPTIMIZERS["Adam"](m.parameters()) for m in (model, serial))
    dc.parallelize(model, grid, shard_parameters=True)
    for seed in range(2):
        step(model, mine, dc.distribute_tensor(batch(seed), grid))
        step(serial, its, batch(seed))
    same_state(model, serial)
    twin = dc.parallelize(copy.deepcopy(model), grid)
    assert not any(isinstance(p, dc.DistTensor) for p in twin.parameters())
    same_state(twin, serial)


@pytest.mark.parallel([1, 2, 3])
def test_all_ranks_leave_out_a_step_whose_scaled_gradient_is_infinite_on_one() -> None:
    grid = dc.ProcessGrid(channel=-1)
    model, serial = sharded(grid), net()
    mine, its = OPTIMIZERS["SGD"](model.parameters()), OPTIMIZERS["SGD"](serial.parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for seed in range(3):
        whole = batch(seed)
        if seed == 1:
            whole[0, 0, 0, 0] = torch.inf
        pairs = (model, dc.distribute_tensor(whole, grid), mine), (serial, whole, its)
        for (m, x, optimizer), scaler in zip(pairs, scalers, strict=True):
            m.eval()
            optimizer.zero_grad()
            scaler.scale(m(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        same_state(model, serial)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0


@pytest.mark.parallel([1, 2])
def test_norms_that_are_not_finite_are_refused_where_asked() -> None:
    model = sharded(dc.ProcessGrid(channel=-1))
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan).detach()
    with pytest.raises(RuntimeError, match="is nan; pass error_if_nonfinite=False"):
        dc.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert dc.clip_grad_norm_([], 1.0) == 0


@pytest.mark.parallel([1, 2, 4])
def test_gradients_of_several_passes_accumulate_also_without_sync() -> None:
    for grid in grids(3):
        model, serial = sharded(grid), net()
        for seed in range(4):
            F.log_softmax(serial(batch(seed)), 1).square().mean().backward()
        x = [dc.distribute_tensor(batch(seed), grid) for seed in range(4)]
        F.log_softmax(model(x[0]), 1).square().mean().backward()
        with dc.no_sync(model):
            for each in x[1:3]:
                F.log_softmax(model(each), 1).square().mean().backward()
        F.log_softmax(model(x[3]), 1).square().mean().backward()
        same_gradients(model, serial)


@pytest.mark.parallel([2, 3])
def test_a_sharded_parameter_is_the_whole_tensor_to_the_program() -> None:
    model, serial = sharded(dc.ProcessGrid(channel=-1)), net()
    weight = model.conv.weight
    assert isinstance(weight, nn.Parameter) and isinstance(weight, DistTensor)
    assert weight.shape == (6, 3, 3, 3) and model.tied.weight is weight
    assert "grid_layout=Layout(filter='channel')" in repr(weight)
    assert weight.grid_layout == dc.Layout(filter="channel") == dc.Layout(sample="channel")
    penalty = sum((p.square().sum() for p in model.parameters()), torch.zeros(()).double())
    expected = sum((p.square().sum() for p in serial.parameters()), torch.zeros(()).double())
    assert deviation(penalty.detach().full_tensor(), expected.detach()) <= 1e-12
    twin = copy.deepcopy(model)
    assert isinstance(twin.conv.weight, nn.Parameter)
    with pytest.raises(dc.UnsupportedOperation, match="full_state_dict"):
        torch.save(model.state_dict(), "/dev/null")


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("name", [f.__name__ for f in RULES if f.__name__.startswith("_foreach")])
def test_functions_of_lists_take_sharded_and_whole_tensors_together(name: str) -> None:
    grid, rng = dc.ProcessGrid(channel=-1), random.Random(4)
    lists = [[random_tensor(rng, shape).abs() for shape in SHAPES] for _ in range(3)]
    cut = [[dc.distribute_tensor(a, grid), dc.distribute_tensor(b, grid), c] for a, b, c in lists]
    others = 0 if name in ALONE else 2 if "addc" in name or "lerp" in name else 1
    options = {"value": 2} if "addc" in name else {}
    function = getattr(torch, name)
    expected, actual = (
        function(first, *rest[:others], **options) or first for first, *rest in (lists, cut)
    )
    for x, y in zip(actual, expected, strict=True):
        assert deviation(x, y) <= 1e-12


SHAPES = ((3, 5), (4, 4), (2,))
ALONE = [
    f"_foreach_{name}{place}"
    for name in ("neg", "abs", "sign", "sqrt", "rsqrt", "reciprocal", "zero", "norm")
    for place in ("", "_")
]


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "weight_norm by a hook": nn.utils.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "scale": lambda m: nn.utils.parametrize.register_parametrization(m, "weight", nn.Softplus()),
}


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("name", PARAMETRIZATIONS)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_weights_that_are_parametrized_before_stay_whole_and_train_as_serially(name: str) -> None:
    grid = dc.ProcessGrid(channel=-1)
    model, serial = net(), net()
    for m in (model, serial):
        torch.manual_seed(1)
        PARAMETRIZATIONS[name](m.down)
    dc.parallelize(model, grid, shard_parameters=True)
    assert not any(isinstance(p, DistTensor) for p in model.down.parameters())
    mine, its = OPTIMIZERS["AdamW"](model.parameters()), OPTIMIZERS["AdamW"](serial.parameters())
    for seed in range(2):
        step(model, mine, dc.distribute_tensor(batch(seed), grid))
        step(serial, its, batch(seed))
    same_state(model, serial)


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("name", PARAMETRIZATIONS)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_sharded_weights_are_not_parametrized_afterwards(name: str) -> None:
    model = sharded(dc.ProcessGrid(channel=-1))
    with pytest.raises(dc.UnsupportedOperation, match="Apply parametrizations.* before parallel"):
        PARAMETRIZATIONS[name](model.down)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("before", [True, False])
def test_weights_that_were_frozen_train_again(before: bool) -> None:
    grid = dc.ProcessGrid(sample=2 if dc.ProcessGrid(sample=-1).size == 4 else 1, channel=-1)
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1)).double()
    model = copy.deepcopy(serial)
    if before:
        model[0].requires_grad_(False)
    model = dc.parallelize(model, grid, shard_parameters=True)
    model[0].requires_grad_(False).requires_grad_(True)
    x = torch.randn(4, 4, 6, 6, dtype=torch.float64)
    serial(x).square().sum().backward()
    model(dc.distribute_tensor(x, grid)).square().sum().backward()
    same_gradients(model, serial, 1e-12)


INITIALIZERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("uniform_", "normal_", "trunc_normal_", "ones_", "orthogonal_"), ()),
    **dict.fromkeys(("xavier_uniform_", "xavier_normal_"), (2.0,)),
    **dict.fromkeys(("kaiming_uniform_", "kaiming_normal_"), (0.3, "fan_out")),
    **{"constant_": (0.3,), "dirac_": (), "sparse_": (0.3,)},
}
FILLS: dict[str, Callable[[Any], Any]] = {
    **{n: lambda w, n=n, a=a: getattr(nn.init, n)(w, *a) for n, a in INITIALIZERS.items()},
    "data": lambda weight: weight.data.normal_(0, 0.02),
    "detached": lambda weight: weight.detach().uniform_(-1, 2),
    "part": lambda weight: weight.data[1:3].normal_(),
    "exponential": lambda weight: weight.data.exponential_(2.0),
    "copied": lambda weight: weight.data.copy_(torch.empty_like(weight).normal_()),
    "no_grad": torch.no_grad()(lambda weight: weight.normal_(0.1, 0.02)),
}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", FILLS)
def test_sharded_weights_are_filled_as_serially_from_the_same_seed(name: str) -> None:
    model: Any = sharded(dc.ProcessGrid(channel=-1))
    serial: Any = net()
    drawn = []
    for m in (model, serial):
        torch.manual_seed(3)
        FILLS[name](m.head.weight if name == "sparse_" else m.down.weight)
        drawn.append(torch.rand(1))
    assert drawn[0] == drawn[1]
    same_state(model, serial, 1e-15)


@pytest.mark.parallel([2, 4])
def test_ranks_of_different_seeds_draw_one_weight() -> None:
    model: Any = sharded(dc.ProcessGrid(channel=-1))
    torch.manual_seed(WORLD.rank)
    nn.init.orthogonal_(model.down.weight)
    rows = model.down.weight.full_tensor().flatten(1)
    assert deviation(rows @ rows.t(), torch.eye(7, dtype=torch.float64)) <= 1e-12


@pytest.mark.parallel([2, 4])
def test_an_identity_says_how_to_get_it() -> None:
    model: Any = sharded(dc.ProcessGrid(channel=-1))
    with pytest.raises(dc.UnsupportedOperation, match=r"x.copy_\(torch.eye"):
        nn.init.eye_(model.head.weight)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("own", [True, False])
def test_parameters_go_to_a_vector_and_come_back(own: bool) -> None:
    for grid in grids(7):
        model, serial = sharded(grid), net()
        vectors = [nn.utils.parameters_to_vector(m.parameters()).detach() for m in (model, serial)]
        assert deviation(*vectors) == 0
        for m, vector in ((model, vectors[not own]), (serial, vectors[1])):
            nn.utils.vector_to_parameters(vector * 2, m.parameters())
        mine, its = (OPTIMIZERS["SGD"](m.parameters()) for m in (model, serial))
        step(model, mine, dc.distribute_tensor(batch(0), grid))
        step(serial, its, batch(0))
        same_state(model, serial)


@pytest.mark.parallel([2])
def test_data_of_another_shape_or_type_are_refused_for_a_sharded_weight() -> None:
    model: Any = sharded(dc.ProcessGrid(channel=-1))
    for wrong in (torch.zeros(7, 6, 3, 2).double(), torch.zeros(7, 6, 3, 3)):
        with pytest.raises(dc.UnsupportedOperation, match="is set to .* Convert a module before"):
            model.down.weight.data = wrong


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("shard", [True, False])
def test_a_state_that_makes_new_parameters_says_how_to_load_it(shard: bool) -> None:
    grid = dc.ProcessGrid(channel=-1)
    model, serial = dc.parallelize(net(), grid, shard_parameters=shard), net(1)
    state = {name: value.clone() for name, value in serial.state_dict().items()}
    for m in (model, serial):
        m.load_state_dict(copy.deepcopy(state), assign=True)
    x = dc.distribute_tensor(batch(0), grid)
    with pytest.raises(RuntimeError, match="unparallelize.*without assign=True"):
        model(x)
    dc.parallelize(dc.unparallelize(model), grid, shard_parameters=shard)
    step(model, OPTIMIZERS["SGD"](model.parameters()), x)
    step(serial, OPTIMIZERS["SGD"](serial.parameters()), batch(0))
    same_state(model, serial)
