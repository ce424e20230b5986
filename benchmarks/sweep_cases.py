"""The calls that `benchmarks.sweep` times, and why some of them take longer than they should."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHAPES = {2: (1, 32, 256, 256), 3: (1, 16, 64, 64, 64)}
"""By the number of spatial dimensions."""

X, TARGET = object(), object()
"""Stand for the input among the arguments of a call, and for a constant of its shape."""


class Call(nn.Module):
    """A module without parameters that returns the first tensor of a function's result."""

    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return the first tensor of the result."""
        result = self._function(x)
        return result if isinstance(result, Tensor) else result[0]


def _given(argument: Any, x: Tensor) -> Any:
    if isinstance(argument, list):
        return [_given(a, x) for a in argument]
    if argument is TARGET:
        return x.detach() * 0.5
    return x if argument is X else argument


Case = Callable[[int], nn.Module]
"""Makes the module for tensors with so many spatial dimensions."""


def _of(function: Callable[[Tensor], Any]) -> Case:
    return lambda n: Call(function)


def _call(name: str, *arguments: Any, **options: Any) -> Case:
    """Return the case of a torch function, in whose name {} stands for the number of dimensions."""
    homes = (F, torch, torch.special, torch.linalg, torch.Tensor)

    def make(n: int) -> nn.Module:
        found = (getattr(home, name.format(n), None) for home in homes)
        function = next(f for f in found if callable(f))
        return Call(lambda x: function(*(_given(a, x) for a in arguments), **options))

    return make


def _each(words: str, *arguments: Any, **options: Any) -> dict[str, Case]:
    return {name: _call(name, *arguments, **options) for name in words.split()}


def _layer(name: str, *arguments: Any, **options: Any) -> Case:
    def make(n: int) -> nn.Module:
        channels = SHAPES[n][1]
        given = (channels if a is X else a for a in arguments)
        named = {key: channels if a is X else a for key, a in options.items()}
        layer: nn.Module = getattr(nn, name.format(n))(*given, **named)
        return layer

    return make


def _pooled(name: str, numerator: int, denominator: int) -> Case:
    """Return adaptive pooling to so many outputs for each of `denominator` inputs."""

    def pool(x: Tensor) -> Any:
        function = getattr(F, name.format(x.dim() - 2))
        return function(x, [n * numerator // denominator for n in x.shape[2:]])

    return _of(pool)


def _linear(x: Tensor, **options: Any) -> Tensor:
    return F.interpolate(x, mode={4: "bilinear", 5: "trilinear"}[x.dim()], **options)


def _bicubic(x: Tensor, **options: Any) -> Tensor:
    return F.interpolate(x.flatten(1, 2) if x.dim() == 5 else x, mode="bicubic", **options)


def _unpooled(x: Tensor) -> Tensor:
    pool: Any = F.max_pool2d if x.dim() == 4 else F.max_pool3d
    unpool: Any = F.max_unpool2d if x.dim() == 4 else F.max_unpool3d
    return unpool(*pool(x, 2, return_indices=True), 2)


def _padded(mode: str, x: Tensor) -> Tensor:
    return F.pad(x, (2,) * 2 * (x.dim() - 2), mode)


CASES: dict[str, dict[str, Case]] = {
    "Element by element": {
        **_each(
            """
            abs acos angle asin asinh atan atanh ceil celu clone cos cosh deg2rad digamma elu erf
            erfc erfinv exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0
            isfinite isinf isnan leaky_relu lgamma log log10 log1p log2 logit logsigmoid mish
            nan_to_num neg positive rad2deg reciprocal relu relu6 round rsqrt selu sgn sigmoid sign
            signbit silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh tanhshrink
            trunc entr erfcx expit i0e i1 i1e log_ndtr ndtr ndtri double half bfloat16 int
            """,
            X,
        ),
        "acosh": _of(lambda x: (x + 1).acosh()),
        **_each(
            """
            add atan2 copysign div eq float_power fmax fmin fmod ge gt hypot isclose le logaddexp
            logaddexp2 lt maximum minimum mul ne pow remainder rsub sub xlog1py xlogy
            """,
            *(X, X),
        ),
        **_each("addcdiv addcmul lerp", X, X, X),
        **_each("clamp", X, 0.3, 0.7),
        **_each("threshold", X, 0.3, 0.5),
        "prelu": _layer("PReLU"),
        "masked_fill": _of(lambda x: x.masked_fill(x > 0.5, 1.0)),
        "where": _of(lambda x: torch.where(x > 0.5, x, -x)),
        "complex": _of(lambda x: torch.complex(x, x).abs()),
    },
    "Reductions and along a dimension": {
        **_each("sum mean var std var_mean amax norm vector_norm", X),
        **_each("max min argmax count_nonzero nansum", X),
        "logsumexp": _of(lambda x: x.logsumexp((2, 3))),
        "sum of height": _of(lambda x: x.sum(2)),
        "amax of height": _of(lambda x: x.amax(2)),
        "argmax of height": _of(lambda x: x.argmax(2)),
        "var of height": _of(lambda x: x.var(2)),
        **{
            f"{name} of {where}": _call(name, X, dim)
            for name in ("softmax", "log_softmax", "cumsum")
            for where, dim in (("channels", 1), ("height", 2))
        },
        "normalize": _of(lambda x: F.normalize(x)),
        "cosine_similarity": _of(lambda x: F.cosine_similarity(x, x * x)),
        "renorm": _of(lambda x: x.renorm(2, 1, 3.0)),
        "diff": _of(lambda x: x.diff(dim=2)),
        "gradient": _of(lambda x: torch.gradient(x, dim=2)),
    },
    "Convolution": {
        "conv{}d, 3": _layer("Conv{}d", X, X, 3, padding=1),
        "conv{}d, 3, stride 2": _layer("Conv{}d", X, X, 3, stride=2, padding=1),
        "conv{}d, 1": _layer("Conv{}d", X, X, 1),
        "conv{}d, 3, depthwise": _layer("Conv{}d", X, X, 3, padding=1, groups=X),
        "conv_transpose{}d, 2, stride 2": _layer("ConvTranspose{}d", X, X, 2, stride=2),
        "conv_transpose{}d, 3": _layer("ConvTranspose{}d", X, X, 3, padding=1),
        "linear": _of(lambda x: F.linear(x.movedim(1, -1), x.new_ones(8, x.shape[1]))),
    },
    "Pooling": {
        "max_pool{}d, 2": _call("max_pool{}d", X, 2),
        "max_pool{}d, 3, stride 2": _call("max_pool{}d", X, 3, 2, 1),
        "avg_pool{}d, 2": _call("avg_pool{}d", X, 2),
        "avg_pool{}d, 3, stride 1": _call("avg_pool{}d", X, 3, 1, 1),
        "lp_pool{}d, 2": _call("lp_pool{}d", X, 2, 2),
        **{
            f"{name}, {words}": _pooled(name, *ratio)
            for name in ("adaptive_avg_pool{}d", "adaptive_max_pool{}d")
            for words, ratio in (("a quarter", (1, 4)), ("3 of 8", (3, 8)))
        },
        "adaptive_avg_pool{}d, 1": _call("adaptive_avg_pool{}d", X, 1),
        "max_unpool{}d": _of(_unpooled),
    },
    "Norms": {
        "batch_norm": _layer("BatchNorm{}d", X),
        "group_norm": _layer("GroupNorm", 4, X),
        "instance_norm": _layer("InstanceNorm{}d", X, affine=True),
        "layer_norm": _of(lambda x: F.layer_norm(x, x.shape[1:])),
        "rms_norm": _of(lambda x: F.rms_norm(x, x.shape[1:])),
        "local_response_norm": _of(lambda x: F.local_response_norm(x, 5)),
    },
    "Interpolation": {
        "nearest, 2": _of(lambda x: F.interpolate(x, scale_factor=2)),
        "nearest, 1/2": _of(lambda x: F.interpolate(x, scale_factor=0.5)),
        "nearest-exact, 2": _of(lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact")),
        "linear, 2": _of(lambda x: _linear(x, scale_factor=2)),
        "linear, 1/2": _of(lambda x: _linear(x, scale_factor=0.5)),
        "linear, 2, align_corners": _of(lambda x: _linear(x, scale_factor=2, align_corners=True)),
        "area, 1/2": _of(lambda x: F.interpolate(x, scale_factor=0.5, mode="area")),
    },
    "Interpolation of planes": {
        "bicubic, 2": _of(lambda x: _bicubic(x, scale_factor=2)),
        "bilinear, 1/2, antialias": _of(lambda x: _linear(x, scale_factor=0.5, antialias=True)),
    },
    "Shapes": {
        **{
            f"pad, {mode}": _of(partial(_padded, mode))
            for mode in ("constant", "reflect", "replicate", "circular")
        },
        "flip of height": _of(lambda x: x.flip(2)),
        "roll of height": _of(lambda x: x.roll(3, 2)),
        "cat of channels": _of(lambda x: torch.cat([x, x], 1)),
        "cat of height": _of(lambda x: torch.cat([x, x], 2)),
        "stack": _of(lambda x: torch.stack([x, x])),
        "narrow of height": _of(lambda x: x.narrow(2, 1, x.shape[2] - 2).clone()),
        "every second row": _of(lambda x: x[:, :, ::2].clone()),
        "permute": _of(lambda x: x.movedim(1, -1).contiguous()),
        "reshape": _of(lambda x: x.flatten(0, 1).clone()),
        "repeat": _of(lambda x: x.repeat(2, *(1,) * (x.dim() - 1))),
        "tril": _of(lambda x: x.tril()),
        "index_select of channels": _of(lambda x: x[:, torch.tensor([3, 1, 2])]),
    },
    "Shapes of planes": {
        "pixel_shuffle": _of(lambda x: F.pixel_shuffle(x, 2)),
        "pixel_unshuffle": _of(lambda x: F.pixel_unshuffle(x, 2)),
    },
    "Losses": {
        **_each(
            """
            mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
            binary_cross_entropy_with_logits kl_div soft_margin_loss poisson_nll_loss
            """,
            *(X, TARGET),
        ),
        "cross_entropy": _of(lambda x: F.cross_entropy(x, x.detach().argmax(1))),
    },
    "Random": _each("dropout", X),
}
"""By family and name; {} stands for the number of spatial dimensions."""

OF_PLANES = ("Interpolation of planes", "Shapes of planes")
"""Families of functions that take no volumes."""

_MOVED = "rows change rank, as the result is cut evenly"
_SUMS = "a sum over ranks forward and one backward"
_ONE_SUM = "a sum over ranks forward"
_HALO = "the block is copied beside its halo, and its gradient back: a pass more each way"
_CORRECTED = "a pass more, which corrects the rows that each block has normalised alone"
_HOST = "0.3 ms of the host's work beside a kernel of about one"
_COPIED = "torch copies the rows beside a halo, which are not dense with channels first"
_STRIPS = "the rows beside a halo are calls of their own, and work of the host"
_STATISTICS = "a pass more each way, as statistics of all ranks lie between, and 0.5 ms of the host"
REASONS = {
    "flip of height": "whole blocks change rank",
    **dict.fromkeys(("cat of height", "narrow of height", "every second row"), _MOVED),
    **dict.fromkeys(("sum", "nansum", "sum of height"), _SUMS),
    **dict.fromkeys(("count_nonzero", "mse_loss", "smooth_l1_loss", "huber_loss"), _ONE_SUM),
    "dropout": "numbers hash positions, to be the same on any grid",
    **dict.fromkeys(("softmax of height", "log_softmax of height"), _CORRECTED),
    "cumsum of height": "a pass more, which adds the sums of the blocks before",
    **dict.fromkeys(("diff", "gradient", "roll of height"), _HALO),
    **dict.fromkeys(("max_pool{}d, 3, stride 2", "avg_pool{}d, 3, stride 1"), _HALO),
    **dict.fromkeys(("sgn", "prelu", "nearest, 1/2", "linear, 1/2"), _HOST),
    **dict.fromkeys(("max_pool{}d, 2", "adaptive_avg_pool{}d, a quarter", "area, 1/2"), _HOST),
    **dict.fromkeys(("conv{}d, 3", "conv{}d, 3, stride 2"), _COPIED),
    "conv{}d, 3, depthwise": _STRIPS,
    **dict.fromkeys(("batch_norm", "group_norm", "layer_norm"), _STATISTICS),
    "max_unpool{}d": "each index is compared with its window, and counted in the block",
    "linear, 2": "the kernel begins at the halo; the rows too many are cut away, a pass each way",
    "linear, 2, align_corners": "torch's kernels begin at an input; rows are weighted and added",
}
"""By name, why a call takes longer."""

OF_FORMAT = "torch itself is slower in this format"
"""The reason where a call takes no longer than plain torch in the same format."""
