"""torch.autograd on distributed tensors: gradients on demand, hooks, copies, modes."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distconv as dc
from tests.support.serial import (
    TOLERANCE,
    deviation,
    noted,
    random_grid,
    random_layout,
    random_tensor,
)
from tests.support.verdicts import one_verdict

RANKS = [1, 2, 4]


def close(actual: Tensor, expected: Tensor) -> bool:
    return deviation(actual, expected) <= TOLERANCE


def cases(seed: int, n: int = 8) -> Any:
    """Yield a convolution's input and weight, serial and distributed in a random layout."""
    rng = random.Random(seed)
    for i in range(n):
        grid = random_grid(rng)
        x = random_tensor(rng, (4, 2, rng.randrange(5, 9), 6))
        layout = dc.Layout() if not i else random_layout(rng, grid, x.shape)
        w = random_tensor(rng, (3, 2, 3, 3)).requires_grad_()
        with noted(layout, grid):
            d = dc.distribute_tensor(x, grid, layout)
            v = w.detach().clone().requires_grad_()
            yield rng, x.requires_grad_(), d.requires_grad_(), w, v


@pytest.mark.parallel(RANKS)
def test_grad_gives_the_serial_gradients_of_distributed_and_plain_tensors() -> None:
    for rng, x, d, w, v in cases(0):
        seed = random_tensor(rng, (4, 3, x.shape[2] - 2, 4))

        def gradients(x: Tensor, w: Tensor, seed: Tensor = seed) -> tuple[Tensor, ...]:
            y = F.conv2d(x, w)
            z = y.tanh() * x[:, :1, 1:-1, 1:-1]
            return torch.autograd.grad(z, [x, y, w], seed)

        for actual, expected in zip(gradients(d, v), gradients(x, w), strict=True):
            assert close(actual, expected)
        assert d.grad is None and v.grad is None


@pytest.mark.parallel(RANKS)
def test_gradients_of_plain_tensors_can_be_differentiated_again() -> None:
    for _, x, d, w, v in cases(2):

        def product(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            loss = F.conv2d(x, w).tanh().square().sum()
            g, h = torch.autograd.grad(loss, [w, x], create_graph=True)
            assert type(g) is type(x)
            return torch.autograd.grad((h * x.detach()).sum() + (F.conv2d(h, g)).sum(), [x, w])

        for actual, expected in zip(product(d, v), product(x, w), strict=True):
            assert close(actual, expected)


@pytest.mark.parallel(RANKS)
def test_unused_inputs_have_no_gradient_or_zeros_as_asked() -> None:
    for _, _, d, _, v in cases(3, 3):
        loss = d.square().sum()
        assert torch.autograd.grad(loss, [v], retain_graph=True, allow_unused=True) == (None,)
        (zeros,) = torch.autograd.grad(loss, [v], retain_graph=True, materialize_grads=True)
        assert not zeros.any()
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(loss, [v])


@pytest.mark.parallel([2, 3])
def test_what_would_be_ambiguous_is_refused() -> None:
    _, x, d, w, v = next(cases(4))
    got = torch.autograd.grad(F.conv2d(d, v).full_tensor().sum(), [d, v])
    expected = torch.autograd.grad(F.conv2d(x, w).sum(), [x, w])
    assert all(map(close, got, expected))
    layer = dc.parallelize(torch.nn.Conv2d(2, 3, 3).double(), d.grid)
    with pytest.raises(dc.UnsupportedOperation, match="Compute the output on DistTensors"):
        torch.autograd.grad(layer(d).full_tensor().sum(), [d, layer.weight])
    with pytest.raises(RuntimeError, match="pass one for each"):
        torch.autograd.grad(d.sum(), [d], [torch.ones(()), torch.ones(())])
    with pytest.raises(RuntimeError, match="scalar outputs"):
        torch.autograd.grad(d * d, [d])


@pytest.mark.parallel(RANKS)
def test_backward_of_several_tensors_accumulates_the_serial_gradients() -> None:
    for rng, x, d, w, v in cases(5):
        seed = random_tensor(rng, x.shape)
        torch.autograd.backward([x.square(), F.conv2d(x, w).sum()], [seed, None])
        torch.autograd.backward([d.square(), F.conv2d(d, v).sum()], [seed, None])
        assert close(d.grad, x.grad)
        again = torch.autograd.grad(F.conv2d(d, v).sum(), [v])
        assert close(again[0], w.grad)


@pytest.mark.parallel(RANKS)
def test_hooks_see_and_replace_the_whole_gradient() -> None:
    for _, x, d, w, v in cases(6):
        seen: list[Tensor] = []

        def run(x: Tensor, w: Tensor, seen: list[Tensor] = seen) -> tuple[Tensor, ...]:
            y = F.conv2d(x, w)
            y.register_hook(lambda g: seen.append(g.detach().clone()))
            y.register_hook(lambda g: g.clamp(max=0.5) * g.abs().max())
            x.register_hook(lambda g: 2 * g)
            return torch.autograd.grad((y.sin() * y).sum(), [x, w])

        expected, actual = run(x, w), run(d, v)
        assert close(seen[1], seen[0])
        for got, wanted in zip(actual, expected, strict=True):
            assert close(got, wanted)


@pytest.mark.parallel(RANKS)
def test_a_hook_can_be_removed_and_has_to_return_a_distributed_tensor() -> None:
    _, _, d, _, _ = next(cases(7))
    y = d * 2
    handle = y.register_hook(lambda g: g * 0)
    handle.remove()
    y.sum().backward()
    assert bool((d.grad == 2).all())
    z = d * 2
    z.register_hook(lambda g: g.full_tensor())
    with pytest.raises(TypeError, match="return a DistTensor of shape"):
        z.sum().backward()


@pytest.mark.parallel(RANKS)
def test_a_deep_copy_is_a_leaf_of_its_own() -> None:
    for _, x, d, _, _ in cases(10, 3):
        (d * d).sum().backward()
        twin = copy.deepcopy({"a": d, "b": d})
        assert twin["a"] is twin["b"] and twin["a"].grid_layout == d.grid_layout
        assert close(twin["a"], x) and close(twin["a"].grad, 2 * x)
        (twin["a"] * 3).sum().backward()
        assert close(twin["a"].grad, 2 * x + 3) and close(d.grad, 2 * x)
        with pytest.raises(RuntimeError, match="only leaves"):
            copy.deepcopy(d * 2)


@pytest.mark.parallel(RANKS)
def test_inference_mode_computes_and_records_nothing() -> None:
    for _, x, d, w, v in cases(11, 3):
        net = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm2d(3).double().eval())
        with torch.inference_mode():
            y, expected = net(F.conv2d(d, v)), net(F.conv2d(x, w))
            assert y.is_inference() and not y.requires_grad
            assert close(y, expected)


class _Scored(nn.Module):
    """A network whose middle takes several inputs, some of them plain, and returns several."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Conv2d(2, 3, 3), _Middle(), nn.Conv2d(3, 2, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y, total = self.middle(self.first(x), 2, torch.ones(3, 1, 1, dtype=x.dtype))
        return (self.last(y) * total).square().mean()


class _Middle(nn.Module):
    def forward(self, x: Tensor, n: int, scale: Tensor) -> tuple[Tensor, Tensor]:
        return (x * scale).sin() * n, x.mean()


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("axis", ["height", "sample", "channel"])
@pytest.mark.parametrize("changes", [False, True])
def test_full_backward_hooks_of_modules_get_and_change_the_serial_gradients(
    axis: str, changes: bool
) -> None:
    grid = dc.ProcessGrid(**{axis: -1})
    values = random_tensor(random.Random(3), (3, 2, 6, 5))

    def train(model: nn.Module, x: Tensor) -> list[Tensor]:
        seen: list[Tensor] = []

        def hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            seen.extend(g for g in (*inputs, *outputs) if g is not None)
            return tuple(g if g is None else g * 2 for g in inputs) if changes else None

        def before(module: nn.Module, outputs: Any) -> Any:
            seen.extend(outputs)
            return tuple(g * 3 for g in outputs) if changes else None

        for part in model.modules():
            part.register_full_backward_hook(hook)
            part.register_full_backward_pre_hook(before)
        model(x.requires_grad_()).backward()
        return [*seen, x.grad, *(p.grad for p in model.parameters())]

    expected = train(_Scored(), values.clone())
    actual = train(dc.parallelize(_Scored(), grid), dc.distribute_tensor(values, grid))
    assert len(actual) == len(expected) == 20
    assert all(close(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parallel([2, 3])
def test_what_was_handed_out_comes_back_only_as_a_distributed_tensor() -> None:
    for _, x, d, _w, v in cases(13, 4):
        whole = d.full_tensor() * 2
        with pytest.raises(dc.UnsupportedOperation, match="convert it back by distribute_tensor"):
            d * whole
        back = dc.distribute_tensor(whole, d.grid)
        assert close(torch.autograd.grad((back * d).sum(), [d])[0], 4 * x)
        weight = F.conv2d(d, v).mean((0, 2, 3)).full_tensor()
        with pytest.raises(dc.UnsupportedOperation, match="a result of to_local"):
            torch.sub(d.mean(), weight[0])


@pytest.mark.parallel(RANKS)
def test_grad_of_plain_tensors_that_were_distributed_is_the_serial_one() -> None:
    for rng, x, d, _w, _v in cases(14, 6):
        p, layout = random_tensor(rng, x.shape).requires_grad_(), d.grid_layout
        seed = random_tensor(rng, x.shape)
        (expected,) = torch.autograd.grad((p * 2).sin() * x, p, seed)
        (whole,) = torch.autograd.grad(
            dc.distribute_tensor(p * 2, d.grid, layout).sin() * d, p, seed
        )
        assert close(whole, expected)
        box = dc.local_box(x.shape, d.grid, layout)
        q = p.detach()[box.slices].clone().requires_grad_()
        (mine,) = torch.autograd.grad(
            dc.DistTensor.from_local(q * 2, d.grid, layout).sin() * d, q, seed
        )
        assert close(mine, expected[box.slices])
        (both,) = torch.autograd.grad(dc.distribute_tensor(p, d.grid, layout) * p, p, seed)
        assert close(both, 2 * p * seed)


@pytest.mark.parallel([2, 3])
def test_what_would_lose_gradients_is_found_in_keywords_and_lists() -> None:
    for _, _x, d, _w, _v in cases(15, 3):
        whole = d.full_tensor()
        with pytest.raises(dc.UnsupportedOperation, match="a result of to_local"):
            torch.add(d, other=whole)
        with pytest.raises(dc.UnsupportedOperation, match="a result of to_local"):
            torch.cat([d, whole])
        with pytest.raises(dc.UnsupportedOperation, match="a result of to_local"):
            F.layer_norm(d, d.shape[-1:], whole[0, 0, 0])


@pytest.mark.parallel(RANKS)
def test_a_gradient_is_retained_as_the_last_hook_leaves_it() -> None:
    for _, _x, d, _w, _v in cases(17, 3):
        y = d * 2
        y.retain_grad()
        y.register_hook(lambda g: g * 10)
        y.sum().backward()
        assert bool((y.grad == 10).all())
        y.grad = y.grad * 2
        assert bool((y.grad == 20).all())


@pytest.mark.parallel([1, 2])
def test_hooks_do_not_keep_the_graph_alive() -> None:
    _, _x, d, _w, _v = next(cases(18))
    y = d * 2
    y.register_hook(lambda g: g)
    y.retain_grad()
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None


@pytest.mark.parallel([1, 2])
def test_a_leaf_hook_gets_the_leaf_itself() -> None:
    _, _x, d, _w, _v = next(cases(19))
    seen = []
    d.register_post_accumulate_grad_hook(seen.append)
    (d * d).sum().backward()
    assert seen[0] is d


@pytest.mark.parallel([2, 3, 4])
def test_ranks_with_other_graphs_sum_gradients_of_leaves_in_one_order() -> None:
    # The norm of a block without elements is other operators, in which the bias comes first.
    grid = dc.ProcessGrid(sample=-1)
    mean, variance = torch.zeros(2).double(), torch.ones(2).double()
    serial = [torch.arange(6.0).double().view(1, 2, 3), *torch.tensor([[2.0, 3], [5, 7]]).double()]
    layouts = dc.Layout(sample="sample"), dc.Layout(), dc.Layout()
    cut = [dc.distribute_tensor(t, grid, f) for t, f in zip(serial, layouts, strict=True)]
    for tensors in (serial, cut):
        x, weight, bias = (t.requires_grad_() for t in tensors)
        (F.batch_norm(x, mean, variance, weight, bias) ** 2).sum().backward()
        weight.requires_grad_(False).requires_grad_()
        (F.batch_norm(x, mean, variance, weight, bias) ** 3).sum().backward()
    for expected, actual in zip(serial, cut, strict=True):
        assert actual.is_leaf and close(actual.grad, expected.grad)


@pytest.mark.parallel([4])
def test_what_is_contiguous_on_some_ranks_alone_leaves_their_messages_in_order() -> None:
    # One channel is contiguous in both memory formats, so that two of the ranks copy nothing.
    grid = dc.ProcessGrid(channel=2, height=2)
    x, weight = torch.arange(60.0).double().view(1, 3, 5, 4), torch.ones(3).double()
    results = []
    for t in (x.clone(), dc.distribute_tensor(x, grid, dc.Layout(channel="channel"))):
        for format_of in (
            lambda t: t.contiguous(memory_format=torch.channels_last),
            lambda t: t.to(memory_format=torch.channels_last),
        ):
            leaf, w = t.detach().requires_grad_(), weight.clone().requires_grad_()
            F.batch_norm(format_of(leaf), None, None, w, training=True).exp().sum().backward()
            results.append((leaf.grad, w.grad))
    for expected, actual in zip(results[:2], results[2:], strict=True):
        assert all(map(close, actual, expected))


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize(
    "read", [lambda w: w.to_local(), lambda w: w.clone()], ids=["local", "copy"]
)
def test_a_rank_that_reads_a_replicated_leaf_alone_leaves_messages_in_order(read: Any) -> None:
    # Autograd makes a node anew for a view that is read after a write to its base.
    grid = dc.ProcessGrid(height=-1)
    rng = random.Random(4)
    data, kernel = random_tensor(rng, (2, 2, 8, 4)), random_tensor(rng, (2, 2, 3, 3))
    results = []
    for cut in (False, True):
        x, w = data.clone(), torch.ones(2, 1, 1).double()
        if cut:
            x, w = dc.distribute_tensor(x, grid), dc.distribute_tensor(w, grid, dc.Layout())
        x.requires_grad_(), w.requires_grad_()
        for _ in range(3):
            if cut and grid.rank == 0:
                read(w)
            (F.conv2d(x, kernel, padding=1) * w).pow(2).sum().backward()
            with torch.no_grad():
                w.sub_(0.001 * w.grad)
            w.grad = None
        results.append((w, x.grad))
    assert all(map(close, results[1], results[0]))


@pytest.mark.parallel(RANKS)
def test_leaves_that_change_keep_serial_gradients() -> None:
    grid = dc.ProcessGrid(height=-1)
    data = torch.arange(16.0).double().view(1, 1, 8, 2)

    def detached(w: Tensor) -> Tensor:
        (w * 2).sum().backward()
        kept = w.grad
        assert w.detach_() is w and not w.requires_grad and close(w.grad, kept)
        return w.requires_grad_()

    def reshaped(w: Tensor) -> Tensor:
        return w.requires_grad_(False).unsqueeze_(0).requires_grad_()

    for change in (detached, reshaped):
        gradients = []
        for cut in (False, True):
            x, w = data, torch.tensor([2.0, 3.0]).double()
            if cut:
                x, w = dc.distribute_tensor(x, grid), dc.distribute_tensor(w, grid, dc.Layout())
            w = change(w.requires_grad_())
            ((x * w) ** 2).sum().backward()
            gradients.append(w.grad)
        assert close(gradients[1], gradients[0])


@pytest.mark.parallel(RANKS)
def test_leaves_of_inference_mode_have_serial_gradients() -> None:
    grid = dc.ProcessGrid(height=-1)
    gradients = []
    for cut in (False, True):
        w, u = torch.ones(2).double(), torch.ones(2).double()
        if cut:
            w, u = (dc.distribute_tensor(t, grid, dc.Layout()) for t in (w, u))
        u.requires_grad_()
        with torch.inference_mode():
            v = (w * 1).requires_grad_()
        (v + u).sum().backward()
        gradients += [v.grad, u.grad]
    assert all(map(close, gradients[2:], gradients[:2]))


@pytest.mark.parallel([1, 2])
def test_replicated_leaves_are_written_as_in_torch() -> None:
    grid = dc.ProcessGrid(height=-1)
    for w in (torch.ones(3, 2), dc.distribute_tensor(torch.ones(3, 2), grid, dc.Layout())):
        w.requires_grad_()
        for write in (lambda w: w.add_(1), lambda w: w[1:].add_(1), lambda w: w.__setitem__(0, 2)):
            with pytest.raises(RuntimeError, match="leaf"):
                write(w)
            with torch.no_grad():
                write(w)
        w.detach().mul_(2)
        assert w.requires_grad and (w * 2).requires_grad
        assert float(w.requires_grad_(False).add_(1).sum()) == 2 * (2 + 2 + 3 * 4) + 6


@pytest.mark.parallel([2, 4])
def test_a_replicated_leaf_without_a_gradient_has_none_as_in_torch() -> None:
    grid, x = dc.ProcessGrid(height=-1), torch.ones(2, 3, 4, 4, dtype=torch.float64)
    layer = nn.Conv2d(3, 2, 3, dtype=torch.float64)

    def penalty(x: Tensor) -> Tensor:  # does not depend on x
        (g,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        return g.square().sum()

    for function in (penalty, lambda x: torch.linalg.vector_norm(x, 0)):
        seen: list[Tensor | None] = []
        serial = x.clone().requires_grad_()
        function(serial).backward()
        leaf = dc.distribute_tensor(x, grid, dc.Layout()).requires_grad_()
        leaf.register_hook(seen.append)
        function(leaf).backward()
        assert serial.grad is None and leaf.grad is None
        assert seen[-1] is None


@pytest.mark.parallel([2, 4])
def test_a_rank_without_a_part_of_a_leafs_gradient_has_the_sum() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = torch.arange(4.0, dtype=torch.float64)
    leaf = dc.distribute_tensor(x, grid, dc.Layout()).requires_grad_()
    sums = leaf.redistribute(dc.Layout()).to_local()
    # Of a norm of order 0 torch passes no gradient on.
    own = sums.sum() if grid.rank == 0 else torch.linalg.vector_norm(sums, 0)
    y = dc.DistTensor.from_local(own.reshape(1), grid, dc.Layout(sample="height"))
    seen: list[Tensor | None] = []
    leaf.register_hook(seen.append)
    y.sum().backward()
    with one_verdict():
        assert torch.equal(leaf.grad.full_tensor(), torch.ones_like(x) / grid.size)
        assert len(seen) == 1 and isinstance(seen[0], dc.DistTensor)
