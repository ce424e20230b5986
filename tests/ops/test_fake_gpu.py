"""No rule mixes the memory of the host with that of a GPU, or lets the host wait for it.

The GPU is torch's "meta" device, whose tensors have no elements: every sample call runs forward and
backward as one rank of a grid that is not there (`distconv.planning.dry_run`), and what is asked
for its elements raises. `Gpu` refuses the rest: operators on tensors of both devices, and copies
between them. What serial torch refuses as well there, as `.item()`, is left out.

Not seen: streams, transports, and memory that is used too early; what torch's own kernels wait for;
types of autocast and other choices between kernels; the orders of dimensions in memory; values.
What is made once and kept may come from the host, so a call that fails is made once more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import distconv as dc
import distconv.layers as dl
from distconv.ops.conv.functions import METHODS
from distconv.ops.pool import average
from distconv.planning.dry_run import DryRunGrid
from distconv.tensor.dist_tensor import DistTensor
from tests.support.samples import (
    BOOLEANS,
    CHANNELS,
    LABELS,
    SAMPLES,
    UNIT,
    Operand,
    Sample,
    X,
    bare,
    of,
    samples_of,
    with_rules,
)
from tests.support.serial import noted

ATEN = torch.ops.aten


class Fault(Exception):
    """An action that a GPU refuses, or that waits for it."""


class Gpu(TorchDispatchMode):
    """Watch the operators that reach torch below autograd, backward passes included."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        """Operators on tensors of the GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        whole = func.overloadpacket in _COPYING
        # A single number of the host travels with the kernel, for most.
        places = {t.device.type for t in given if t.dim() or t.is_meta or whole}
        if len(places) > 1:
            raise Fault(f"{func} mixes tensors of the host and of the GPU")
        self.seen += "meta" in places
        result = func(*args, **(kwargs or {}))
        made = {t.device.type for t in tree_leaves(result) if isinstance(t, Tensor)}
        if given and not made <= {t.device.type for t in given}:
            raise Fault(f"{func} copies between the host and the GPU")
        return result


_COPYING = {ATEN.copy_, ATEN.where, ATEN.index_put, ATEN.index_put_}
"""Operators that copy a number of the host first, and so wait."""


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rules take meta tensors for a GPU's; tensors made of numbers come from the host."""
    monkeypatch.setattr(average, "is_accelerator", lambda device: device.type == "meta")
    for name in ("tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, _from_the_host(getattr(torch, name)))
    monkeypatch.setattr(Tensor, "new_tensor", lambda x, data: torch.tensor(data, device=x.device))


def _from_the_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        return make(data, **options).to(device)

    return made


def _flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _block(x: Tensor) -> Tensor:
    return x.shard if isinstance(x, DistTensor) else x


def forward_and_backward(call: Callable[..., Any], tensors: list[Tensor]) -> None:
    """Run a call forward and backward, and check that results and gradients lie on the GPU."""
    for x in tensors:
        x.requires_grad_(x.is_floating_point() or x.is_complex())
    made = [y for y in _flat(call(*tensors)) if isinstance(y, Tensor)]
    differentiable = [y for y in made if y.requires_grad]
    for i, y in enumerate(differentiable):
        seed: Tensor = torch.ones_like(y.detach())
        y.backward(seed, retain_graph=i + 1 < len(differentiable))
    gradients = [x.grad for x in tensors if x.grad is not None]
    for t in map(_block, (*made, *gradients)):
        if not t.is_meta:
            raise Fault(f"a result {tuple(t.shape)} lies on the host")


def _meta(operand: Operand) -> Tensor:
    return operand.values(random.Random(0), operand.shape).to("meta")


def _waits_serially(call: Callable[..., Any], sample: Sample) -> bool:
    """Return whether serial torch has to wait as well."""
    tensors = [_meta(o) for plain in (False, True) for o in sample.operands(plain)]
    try:
        with Gpu():
            forward_and_backward(call, tensors)
    except (RuntimeError, TypeError, Fault):
        return True
    return False


def _cut(sample: Sample, size: int | None, grid: DryRunGrid) -> list[Tensor]:
    """Return the tensors of a sample call, cut where they have `size` elements."""
    tensors: list[Tensor] = []
    for o in sample.operands(plain=False):
        at = o.shape.index(size) if size in o.shape else None
        cuts = tuple(("height",) * (d == at) for d in range(len(o.shape)))
        tensors.append(grid.tensor(o.shape, dc.Layout.of(cuts), _meta(o).dtype))
    return tensors + [_meta(o) for o in sample.operands(plain=True)]


def _watched(call: Callable[..., Any], make: Callable[[], list[Tensor]], gpu: Gpu) -> None:
    """Run a call on a GPU; where that fails, again, when all that is kept has been made."""
    tensors = make()
    try:
        with gpu:
            forward_and_backward(call, tensors)
    except Fault:
        forward_and_backward(call, make())
        tensors = make()
        with gpu:
            forward_and_backward(call, tensors)


RANKS = [(3, 1), (16, 15)]
"""Sizes of grids and one rank of each, of which the latter has empty blocks."""


def check(call: Callable[..., Any], sample: Sample, gpu: Gpu) -> bool:
    """Run a call on tensors that are cut along the first and the last dimension, or whole.

    They take turns of `RANKS`. False where serial torch has to wait, too.
    """
    if _waits_serially(call, sample):
        return False
    shape = sample.operands(plain=False)[0].shape
    sizes = [*dict.fromkeys((*shape[:1], *shape[-1:], None))]
    for size, (ranks, rank) in zip(sizes, RANKS, strict=False):
        grid = DryRunGrid({"height": ranks}, rank)
        where = f"cut where there are {size}, rank {rank} of {ranks}"
        with noted(where), suppress(dc.UnsupportedOperation):
            _watched(call, partial(_cut, sample, size, grid), gpu)
    return True


NAMES = [
    *{bare(name): name for name in [*(n for n in SAMPLES if "." in n), *with_rules()]}.values()
]
"""One name for each function that is found in several places."""

_LEFT_OUT = {
    "new_tensor",  # which tests replace
    "poisson",  # whose bisection asks when it has ended
    *("masked_scatter", "masked_scatter_"),  # which ask how many places the mask has
}
NAMES = [name for name in NAMES if bare(name) not in _LEFT_OUT]

PLANES = [name for name in NAMES if "conv" in name or "pool" in name]

WAITING = {
    *("gaussian_nll_loss", "item", "tolist", "numpy", "cpu", "__array__", "__contains__"),
    *("__float__", "__int__", "__bool__", "__index__", "__complex__", "__nonzero__", "__long__"),
    *("allclose", "equal", "is_nonzero", "masked_select", "nonzero", "argwhere", "unique"),
    *("unique_consecutive", "repeat_interleave", "bincount", "histogram"),
    *(("combinations",) if torch.__version__ < (2, 14) else ()),
    *("index_fill", "index_fill_", "index_put", "index_put_", "cov", "corrcoef", "istft"),
    *("multi_margin_loss", "multilabel_margin_loss", "one_hot", "unravel_index"),
    *("binomial", "_sample_dirichlet", "_dirichlet_grad"),
    *("_standard_gamma", "_standard_gamma_grad"),
}
"""Functions that ask for values in serial torch, or have no kernel for meta tensors there."""


def _checked(names: Iterable[str], gpu: Gpu) -> set[str]:
    """Check functions on their samples; return those for which serial torch has to wait."""
    waiting = set()
    for name in names:
        for sample in samples_of(name):

            def call(*tensors: Tensor, name: str = name, sample: Sample = sample) -> Any:
                return sample.call(name, *tensors)

            with noted(name, sample.args[1:]):
                if not check(call, sample, gpu):
                    waiting.add(bare(name))
    return waiting


@pytest.mark.parallel([1])
@pytest.mark.filterwarnings("ignore")
def test_no_sample_mixes_devices_or_waits() -> None:
    gpu = Gpu()
    assert _checked(NAMES, gpu) == WAITING
    assert gpu.seen > 10_000


@pytest.mark.parallel([1])
@pytest.mark.filterwarnings("ignore")
def test_no_overlapped_sample_mixes_devices_or_waits() -> None:
    with dc.method("overlapped"):
        assert _checked(PLANES, Gpu()) == set()


def _assigned(x: Tensor, index: Any, value: Any) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


CASES: dict[str, tuple[Callable[..., Any], Sample]] = {
    "class weights": (
        lambda x, y, w: F.cross_entropy(x, y, w.detach(), label_smoothing=0.1),
        of(X, LABELS, CHANNELS),
    ),
    "weights of a loss": (lambda x, y, w: F.mse_loss(x, y, weight=w.detach()), of(X, X, X)),
    "position weights": (
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w.detach()),
        of(X, UNIT, Operand((7,), plain=True)),
    ),
    "a mask assigned to": (lambda x, m: _assigned(x, m, 2.5), of(X, BOOLEANS)),
    "a slice assigned to": (lambda x, y: _assigned(x, (..., 2), y[..., 1]), of(X, X)),
    "a tensor of positions": (
        lambda x, i: x[:, i],
        of(X, Operand((2, 3), LABELS.values, plain=True)),
    ),
    "running statistics of each sample": (
        lambda x, m, v: F.instance_norm(x, m.detach(), v.detach()),
        of(X, CHANNELS, CHANNELS),
    ),
    "probabilities": (
        lambda x, p: torch.empty_like(x).bernoulli_(p.detach()),
        of(X, Operand((7,), UNIT.values, plain=True)),
    ),
    "a mask of attention": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        of(X, X, X, Operand((5, 5), plain=True)),
    ),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        of(X, X, X),
    ),
    **{
        f"padding, {mode}": (lambda x, mode=mode: F.pad(x, (1, 2, 2, 1), mode), of(X))
        for mode in ("circular", "replicate")
    },
    **{
        f"interpolation, {mode}": (
            lambda x, mode=mode, options=options: F.interpolate(x, (9, 4), mode=mode, **options),
            of(X),
        )
        for mode, options in {
            "bicubic": {"align_corners": True},
            "bilinear": {"antialias": True},
            "nearest-exact": {},
            "area": {},
        }.items()
    },
    "uneven averages": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        of(X),
    ),
    "maxima and their places": (
        lambda x: F.max_pool2d(x, 3, 2, 1, dilation=2, return_indices=True, ceil_mode=True),
        of(Operand((3, 4, 9, 11))),
    ),
}
"""Calls that take other paths than the samples: on tensors, distributed and then plain ones."""


@pytest.mark.parallel([1])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_no_case_mixes_devices_or_waits(case: str, method: str) -> None:
    call, sample = CASES[case]
    with dc.method(method):
        assert check(call, sample, Gpu())


@pytest.mark.parallel([1])
@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.cpu(),
        lambda x: torch.zeros_like(x, device="cpu"),
        lambda x: x.new_ones(2, 4, 5, 3, device="cpu"),
        lambda x: x.new_full((3,), 2.0, device="cpu"),
    ],
)
def test_what_would_lie_on_the_host_is_refused(move: Callable[[Tensor], Tensor]) -> None:
    x = DryRunGrid({"height": 3}, 1).tensor((2, 4, 5, 3))
    with pytest.raises(dc.UnsupportedOperation, match="are on its devices, not on cpu"):
        move(x)


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "memory of the host": lambda x: x + torch.ones(x.shape),
    "a table of the host": lambda x: torch.arange(9.0)[(x > 0).long()],
    "a constant from the host": lambda x: x * torch.tensor(2.5, device=x.device),
    "a new constant": lambda x: x * x.new_tensor(2.5),
    "a number copied": lambda x: torch.where(x > 0, x, torch.tensor(0.0, dtype=x.dtype)),
    "a value": lambda x: x * x.sum().item(),
    "a decision": lambda x: -x if (x > 0).all() else x,
    "a mask as index": lambda x: x.masked_fill(x[x > 0].sum() > 0, 0.0),
    "a result on the host": lambda x: torch.zeros(x.shape),
}


class _Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * torch.ones(grads[0].shape[-1:])


@pytest.mark.parallel([1])
@pytest.mark.parametrize("fault", [*FAULTS, "the backward pass"])
def test_faults_are_noticed(fault: str) -> None:
    function = dc.elementwise(FAULTS.get(fault, _Faulty.apply))
    # Those of a rule, of which plain tensors know nothing.
    with pytest.raises((Fault, RuntimeError)):
        check(lambda x: function(x) if isinstance(x, DistTensor) else x, of(X), Gpu())


class Alone(DryRunGrid):
    """A rank of a grid that is not there, among others that have the same model."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return what this rank passes, as all others pass the same."""
        return [value]


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular", bias=False),
        dl.BatchNorm2d(8, statistics="sample"),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        dl.Conv2d(8, 6, 3, 2, 1, parallel="x"),
        nn.GroupNorm(2, 6),
        nn.Dropout2d(0.2),
        nn.ConvTranspose2d(6, 4, 2, 2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        dl.Linear(36, 5, parallel="y"),
    ).to("meta")


@pytest.mark.parallel([1])
@pytest.mark.parametrize("shard_parameters", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("foreach", [False, True])
def test_no_step_mixes_devices_or_waits(
    shard_parameters: bool, optimizer: Any, foreach: bool
) -> None:
    grid = Alone({"sample": 2, "channel": 2, "height": 2})
    model = dc.parallelize(net(), grid, shard_parameters=shard_parameters, bucket_bytes=512)
    steps = optimizer(model.parameters(), 0.1, foreach=foreach)
    x, y = grid.tensor((4, 4, 18, 20)), grid.tensor((4,), dtype=torch.int64)
    found, inverse = torch.zeros(1, device="meta"), torch.ones(1, device="meta")

    def step() -> None:
        steps.zero_grad()
        F.cross_entropy(model(x), y).backward()
        gradients = [p.grad for p in model.parameters()]
        assert None not in gradients
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        dc.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()

    step()
    with Gpu() as gpu:
        step()
    assert gpu.seen > 100
