"""Second derivatives equal serial torch's, and all ranks record the same exchanges for them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import distconv as dc
from distconv.ops.support.operands import shard_of
from distconv.tensor.ownership import reaches
from distconv.torch_private import ShardFunction
from tests.support.samples import bare, is_random, samples_of, with_rules
from tests.support.serial import TOLERANCE, deviation, noted, random_tensor

FUNCTIONS = {f"{f.__name__}Backward" for f in ShardFunction.__subclasses__()}


def exchanges(root: Tensor, leaves: Sequence[Tensor]) -> Counter[str]:
    """Return how many nodes that may communicate a gradient passes from `root` to leaves, by name.

    As in autograd, these are the nodes from which a way leads to one of the leaves.
    """
    ends = {get_gradient_edge(shard_of(x)).node for x in leaves}
    leading: dict[Any, bool] = {}
    waiting = [(shard_of(root).grad_fn, False)]
    while waiting:
        node, done = waiting.pop()
        following = [n for n, _ in node.next_functions if n is not None]
        if done:
            leading[node] = node in ends or any(leading[n] for n in following)
        elif node not in leading:
            leading[node] = False
            waiting += [(node, True), *((n, False) for n in following)]
    return Counter(n.name() for n, leads in leading.items() if leads and _communicates(n))


def _communicates(node: Any) -> bool:
    # The norm of a rank's own statistics may be torch's on another rank.
    alone = node.name() == "_NormalizeBlockBackward" and node.context[0].group == ()
    return node.name() in FUNCTIONS and not alone


def check_exchanges(root: Any, leaves: Sequence[Tensor]) -> None:
    """Assert that all ranks take the same exchanges, before they wait for each other."""
    recorded = isinstance(root, Tensor) and root.requires_grad
    own = dict(exchanges(root, leaves)) if recorded else None
    everywhere = MPI.COMM_WORLD.allgather(own)
    assert everywhere == [everywhere[0]] * len(everywhere), everywhere


def curvature(
    call: Callable[..., Any],
    tensors: Sequence[Tensor],
    check: Callable[[Any, Sequence[Tensor]], None],
) -> list[Tensor | None]:
    """Return the gradients of a penalty of the gradients of a function's results."""
    results = call(*tensors)
    results = results if isinstance(results, (tuple, list)) else [results]
    loss: Any = sum(y.sin().sum() for y in results if y.requires_grad)
    leaves = [x for x in tensors if x.requires_grad]
    check(loss, leaves)
    gradients = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    penalty: Any = sum(g.cos().sum() for g in gradients if g is not None and g.requires_grad)
    check(penalty, leaves)
    return list(torch.autograd.grad(penalty, leaves, allow_unused=True))


def agrees_twice(
    call: Callable[..., Any],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    grid: dc.ProcessGrid,
    d: int,
) -> bool:
    """Assert that second derivatives are the serial ones; return whether serial torch has any."""
    serial = [x.clone().requires_grad_(x.is_floating_point()) for x in (*inputs, *parameters)]
    try:
        expected = curvature(call, serial, lambda *_: None)
    except (RuntimeError, TypeError, AttributeError):
        return False
    cut = [dc.distribute_tensor(x, grid, cut_along(x, d)) for x in inputs]
    plain = [p.clone() for p in parameters]
    tensors = [x.requires_grad_(x.is_floating_point()) for x in (*cut, *plain)]
    for got, wanted in zip(curvature(call, tensors, check_exchanges), expected, strict=True):
        none = torch.zeros((), dtype=torch.float64)
        whole = got.full_tensor() if isinstance(got, dc.DistTensor) else got
        pair = [none if t is None else t.detach() for t in (whole, wanted)]
        assert deviation(*torch.broadcast_tensors(*pair)) <= 100 * TOLERANCE
    return True


def cut_along(x: Tensor, d: int) -> dc.Layout:
    """Return the layout of a tensor that is cut along dimension `d` over all ranks."""
    return dc.Layout.of(tuple(("height",) if i == d % x.dim() else () for i in range(x.dim())))


def normalized(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, w, b: norm(x, weight=w, bias=b)


CALLS: dict[str, tuple[Callable[..., Any], tuple[int, ...] | None]] = {
    "batch norm": (
        normalized(lambda x, **k: F.batch_norm(x, None, None, training=True, **k)),
        (4,),
    ),
    "evaluated": (lambda x, w, b: F.batch_norm(x, w.detach(), b.detach().exp(), w, b), (4,)),
    "instance norm": (normalized(F.instance_norm), (4,)),
    "group norm": (normalized(partial(F.group_norm, num_groups=2)), (4,)),
    "layer norm": (normalized(lambda x, **k: F.layer_norm(x, x.shape[1:], **k)), (4, 3, 5)),
    "rms norm": (lambda x, w, _: F.rms_norm(x, x.shape[1:], w), (4, 3, 5)),
    "convolution": (lambda x, w, _: F.conv2d(x, w, stride=2), (6, 4, 2, 2)),
    "softmax": (lambda x: x.softmax(2).pow(3), None),
    "amax": (lambda x: x.amax((1, 2)), None),
    "max": (lambda x: (x.max(), x.max(2).values, x.min(3).values), None),
    "range": (lambda x: tuple(torch.aminmax(x, dim=2)), None),
    "largest norm": (lambda x: torch.linalg.vector_norm(x, torch.inf, (2, 3)), None),
    "max pooling": (lambda x: F.max_pool2d(x, 2, 1, 1), None),
    "adaptive max pooling": (lambda x: F.adaptive_max_pool2d(x, 2), None),
}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("d", range(4))
@pytest.mark.parametrize("shape", [(3, 4, 3, 5), (1, 4, 3, 5), (8, 4, 3, 5)])
def test_second_derivatives_equal_serial(name: str, d: int, shape: tuple[int, ...]) -> None:
    rng, (call, weight) = random.Random(name), CALLS[name]
    parameters = [] if weight is None else [random_tensor(rng, weight) for _ in range(2)]
    grid = dc.ProcessGrid(height=-1)
    assert agrees_twice(call, [random_tensor(rng, shape)], parameters, grid, d)


NORMS = "batch norm", "evaluated", "instance norm", "group norm", "layer norm", "rms norm"


def first_gradients(call: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of the sum of a function's result, to be differentiated again."""
    loss = call(*tensors).sum()
    return list(torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True))


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(1, 4, 3, 5), (4, 4, 3, 5)])
@pytest.mark.parametrize("d", [0, 1])
@pytest.mark.parametrize("name", NORMS)
def test_each_gradient_of_a_norm_leads_to_the_same_leaves_on_all_ranks(
    name: str, d: int, shape: tuple[int, ...], memory_format: torch.memory_format
) -> None:
    # Of one sample all ranks but the first have none.
    rng, (call, weight) = random.Random(name), CALLS[name]
    assert weight is not None
    x = random_tensor(rng, shape).to(memory_format=memory_format)
    parameters = [random_tensor(rng, weight) for _ in range(2)]
    serial = [t.clone().requires_grad_() for t in (x, *parameters)]
    cut = dc.distribute_tensor(x, dc.ProcessGrid(height=-1), cut_along(x, d))
    tensors = [t.requires_grad_() for t in (cut, *(p.clone() for p in parameters))]
    wanted, found = first_gradients(call, serial), first_gradients(call, tensors)
    for own, truth in zip(found, wanted, strict=True):
        check_exchanges(own, tensors)
        if own is None or truth is None or not (own.requires_grad and truth.requires_grad):
            continue
        led = [reaches([shard_of(own)], shard_of(t)) for t in tensors]
        everywhere = MPI.COMM_WORLD.allgather(led)
        assert everywhere == [everywhere[0]] * len(everywhere), everywhere
        seconds = [
            torch.autograd.grad(g.cos().sum(), of, retain_graph=True, materialize_grads=True)
            for g, of in ((own, tensors), (truth, serial))
        ]
        for got, second in zip(*seconds, strict=True):
            whole = got.full_tensor() if isinstance(got, dc.DistTensor) else got
            # Some are zero but for rounding.
            assert (whole - second).abs().max() <= 100 * TOLERANCE


SAMPLED = {bare(n).removesuffix("_"): n for n in with_rules() if not is_random(n)}


@pytest.mark.parallel([4])
@pytest.mark.parametrize("key", SAMPLED)
@pytest.mark.filterwarnings("ignore")
def test_second_derivatives_of_a_sample_equal_serial(key: str) -> None:
    # Of three samples the last rank has none.
    grid, name, rng = dc.ProcessGrid(height=-1), SAMPLED[key], random.Random(key)
    for sample in samples_of(name):
        inputs, parameters = (
            [o.values(rng, o.shape) for o in sample.operands(plain)] for plain in (False, True)
        )
        with noted(name, sample.args[1:]):
            agrees_twice(partial(sample.call, name), inputs, parameters, grid, 0)
