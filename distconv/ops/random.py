"""Random numbers that do not depend on the process grid.

Every element is a hash of its position in the global tensor and a key, so that any grid, and a
single rank, draw the same tensor. The key of a call is drawn on rank 0 from torch's default
generator for its device. The numbers therefore follow `torch.manual_seed` on rank 0, and
`torch.utils.checkpoint` repeats them. They are not the numbers that serial torch draws from that
seed, except for sharded parameters.

The hash is the output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014) on its Weyl sequence, entered at the position.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from math import log1p, pi, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distconv.comm.collectives import broadcast
from distconv.grid.interface import Grid
from distconv.ops.support.arguments import check_on_meta
from distconv.ops.support.dimensions import keeps_shape
from distconv.ops.support.operands import broadcast_shape, global_numbers, local_operand
from distconv.tensor.aliasing import is_of_parameter, prepare_write, update_views
from distconv.tensor.dispatch import RULES, implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.torch_private import assert_async, fans

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def new_key(grid: Grid) -> Tensor:
    """Return a new key for random numbers, drawn on rank 0 and equal on every rank. Collective."""
    key = torch.randint(-(2**63), 2**63 - 1, (), device=grid.device)
    broadcast(key, grid)
    return key


def _uniform(x: DistTensor, dims: int | None = None) -> Tensor:
    """Return uniform random numbers in [0, 1), float64, for this rank's block of `x`. Collective.

    With `dims` given, elements with equal indices in the first `dims` dimensions share a number.
    """
    dims = x.dim() if dims is None else min(dims, x.dim())
    drawn = uniform_at(global_numbers(x, dims), new_key(x.grid))
    return drawn.reshape((*drawn.shape, *(1,) * (x.dim() - dims)))


def uniform_at(numbers: Tensor, key: Tensor) -> Tensor:
    """Return uniform random numbers in [0, 1), float64, hashed from integers and a key.

    Each of the int64 `numbers`, such as the row-major number of an element, gives one random
    number. No communication.
    """
    return _right(_bits_at(numbers, key), 11).double() * 2.0**-53


def _bits_at(numbers: Tensor, key: Tensor) -> Tensor:
    """Return a random 64-bit integer for each of the integers `numbers`, hashed with `key`."""
    # Integer arithmetic wraps around modulo 2^64, as the generator requires.
    bits = (numbers + 1) * _GOLDEN + key
    for shift, factor in _MIX:
        bits = (bits ^ _right(bits, shift)) * factor
    return bits ^ _right(bits, 31)


def normal_at(numbers: Tensor, key: Tensor) -> Tensor:
    """Return a standard normal random number, float64, for each of the integers `numbers`.

    The numbers are hashed with `key`. No communication.
    """
    return _normal(uniform_at(numbers, key))


def _right(bits: Tensor, shift: int) -> Tensor:
    """Return 64-bit integers shifted right by `shift` bits, with zeros from the left."""
    return (bits >> shift) & ((1 << (64 - shift)) - 1)


def _check(function: Callable[..., Any], dtype: torch.dtype, *args: Any) -> None:
    """Draw one element by torch's `function`, so that torch checks the type and arguments.

    The draw does not change torch's default generator. No communication.
    """
    function(torch.zeros(1, dtype=dtype, device="cpu"), *args, generator=torch.Generator())


def _require_real(name: str, input: DistTensor, dtype: torch.dtype) -> None:
    if dtype.is_complex:
        way_out = "Draw the real and the imaginary part, and use torch.complex"
        refuse(name, "complex random numbers are not supported", input, way_out=way_out)


def _to_zero(x: Tensor, kept: Tensor, p: float) -> Tensor:
    return x * (kept / (1 - p) if p < 1 else kept)


def _to_saturation(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Return `x` with dropped elements at SELU's saturation, scaled to keep mean and variance.

    `kept` is 0 for an element to drop, else 1; `p` is the probability of dropping. The map is from
    Klambauer et al., NeurIPS 2017.
    """
    if p == 1:
        return x * kept
    saturation = -1.7580993408473766
    a = 1 / sqrt((1 - p) * (1 + p * saturation**2))
    return (x * kept + saturation * (1 - kept)) * a - a * saturation * p


def _dropout(
    function: Callable[..., Tensor],
    drop: Callable[[Tensor, Tensor, float], Tensor],
    leading: Callable[[int], int] | None = None,
) -> None:
    """Register the rule of a dropout that drops elements, or planes if `leading` is given.

    Parameters
    ----------
    drop: takes a block, a mask with 0 for elements to drop and 1 for others, and the probability p;
        returns the result.
    leading: takes a number of dimensions, and returns the number of leading dimensions that index
        planes, such as 2 for (sample, channel).
    """

    # A reshape does not change the row-major number of an element.
    treats_alike = keeps_shape if leading is None else lambda rule: rule

    @implements(function)
    @treats_alike
    def rule(
        input: DistTensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> DistTensor:
        check_on_meta(function, input, p, training)
        dims = None if leading is None else leading(input.dim())
        if not training or p == 0:
            return input
        shard = drop(input.shard, (_uniform(input, dims) >= p).to(input.dtype), p)
        if inplace:
            return _written(input, shard, function.__name__)
        return DistTensor(shard, input.shape, input.cuts, input.grid)


_dropout(F.dropout, _to_zero)
_dropout(F.dropout1d, _to_zero, lambda ndim: ndim - 1)
_dropout(F.dropout2d, _to_zero, lambda ndim: 2)
_dropout(F.dropout3d, _to_zero, lambda ndim: 2 if ndim == 5 else 1)
_dropout(F.alpha_dropout, _to_saturation)
_dropout(F.feature_alpha_dropout, _to_saturation, lambda ndim: 2)


def _new(
    input: DistTensor,
    values: Tensor,
    dtype: torch.dtype,
    device: Any = None,
    requires_grad: bool = False,
) -> DistTensor:
    drawn = DistTensor(values.to(dtype), input.shape, input.cuts, input.grid)
    result: DistTensor = drawn if device is None else drawn.to(device)  # type: ignore[assignment]
    return result.requires_grad_() if requires_grad else result


def _drawn_like(
    function: Callable[..., Tensor], check: Callable[..., Any], values: Callable[..., Tensor]
) -> Callable[..., DistTensor]:
    """Register and return the rule of `function`: random numbers in the layout of a tensor.

    Parameters
    ----------
    check: torch's in-place method that draws the same numbers; called to check the arguments.
    values: takes uniform numbers, the type and the arguments; returns the random numbers.
    """

    @implements(function)
    def rule(
        input: DistTensor,
        *args: int,
        dtype: torch.dtype | None = None,
        device: Any = None,
        requires_grad: bool = False,
        **bounds: int,
    ) -> DistTensor:
        args = (*args, *(bounds[name] for name in ("low", "high") if name in bounds))
        kind = dtype or input.dtype
        _require_real(function.__name__, input, kind)
        _check(check, kind, *args)
        return _new(input, values(_uniform(input), kind, *args), kind, device, requires_grad)

    return rule


def _integers(u: Tensor, _: torch.dtype, *bounds: int) -> Tensor:
    """Return random integers in [low, high), computed from uniform numbers `u` in [0, 1).

    `bounds` is (high,) or (low, high).
    """
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return (u * (high - low)).floor() + low


rand_like = _drawn_like(
    torch.rand_like,
    torch.Tensor.uniform_,
    lambda u, kind: u.to(kind).clamp_(max=1 - torch.finfo(kind).eps / 2),  # rounds to less than 1
)
_drawn_like(torch.randn_like, torch.Tensor.normal_, lambda u, kind: _normal(u))
_drawn_like(torch.randint_like, torch.Tensor.random_, _integers)


def _probabilities(p: Any, name: str) -> Any:
    """Return `p`; raise RuntimeError on a rank where an element of `p` is outside [0, 1].

    On a GPU the error is raised by a later call. `name` is the name of the function, for the error.
    """
    if isinstance(p, Tensor):
        within = ((p >= 0) & (p <= 1)).all()
        assert_async(
            within, f"{name}: not all elements are probabilities; expected numbers from 0 to 1"
        )
    return p


@implements(torch.bernoulli, torch.Tensor.bernoulli)
def bernoulli(input: DistTensor, p: float | None = None) -> DistTensor:
    _check(torch.bernoulli, input.dtype, *([] if p is None else [p]))
    # All ranks draw before a rank may raise, as the draw is collective.
    drawn = _uniform(input)
    limit = _probabilities(input.shard.detach() if p is None else p, "bernoulli")
    return _new(input, drawn < limit, input.dtype)


def _written(input: DistTensor, values: Tensor, name: str) -> DistTensor:
    prepare_write(input, name)
    input.shard.copy_(values)
    update_views(input)
    return input


def _serial_in_parameters(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a decorator of fill rules: sharded parameters get the numbers of serial torch.

    All ranks draw the global parameter by `function`, take rank 0's values and keep their own
    blocks. This includes fills through `.data`. The decorated rule fills other tensors. Collective.
    """

    def serial(rule: Callable[..., Any]) -> Callable[..., Any]:
        def fill(input: DistTensor, *args: Any, **kwargs: Any) -> Any:
            if not is_of_parameter(input):
                return rule(input, *args, **kwargs)
            whole = torch.empty(input.shape, dtype=input.dtype, device=input.grid.device)
            function(whole, *args, **kwargs)
            broadcast(whole, input.grid)
            return _written(input, whole[input.box.slices], function.__name__)

        return wraps(rule)(fill)

    return serial


def _normal(u: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return torch.special.ndtri(u + 2.0**-54) * std + mean


_FILLS: dict[str, Callable[..., Tensor]] = {
    "uniform_": lambda u, a=0.0, to=1.0: u * (to - a) + a,
    "normal_": _normal,
    "exponential_": lambda u, lambd=1.0: -torch.log1p(-u) / lambd,
    "geometric_": lambda u, p: (torch.log1p(-u) / log1p(-p)).floor() + 1,
    "cauchy_": lambda u, median=0.0, sigma=1.0: median + sigma * torch.tan(pi * (u - 0.5)),
    "log_normal_": lambda u, mean=1.0, std=2.0: _normal(u, mean, std).exp(),
}
"""Methods that fill a tensor with random numbers, each as a function of uniform numbers and the
method's arguments."""


def _fills(name: str, values: Callable[..., Tensor]) -> None:
    method: Callable[..., Any] = getattr(torch.Tensor, name)

    @implements(method)
    @_serial_in_parameters(method)
    def rule(input: DistTensor, *args: float, generator: Any = None, **kwargs: float) -> DistTensor:
        only_default(name, generator, input)
        _require_real(name, input, input.dtype)
        method(torch.zeros(1, dtype=input.dtype), *args, generator=torch.Generator(), **kwargs)
        return _written(input, values(_uniform(input), *args, **kwargs), name)


for _name, _values in _FILLS.items():
    _fills(_name, _values)


@implements(F.rrelu, torch.rrelu)
def rrelu(
    input: Any,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    if lower > upper:
        raise RuntimeError(f"rrelu: lower={lower} is above upper={upper}; expected lower <= upper")
    if not training:
        return F.leaky_relu(input, (lower + upper) / 2, inplace=inplace)
    slopes = lower + (upper - lower) * rand_like(input.detach())
    result = torch.where(input <= 0, input * slopes, input)
    return input.copy_(result) if inplace else result  # type: ignore[no-any-return]


@implements(F.gumbel_softmax)
def gumbel_softmax(
    logits: Any, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    noise = torch.empty_like(logits.detach()).exponential_().log()
    soft = F.softmax((logits - noise) / tau, dim)
    if not hard:
        return soft
    largest = soft.detach().argmax(dim, keepdim=True)
    places = torch.arange(soft.shape[dim], device=soft.device)
    chosen = places.view(-1, *(1,) * (soft.dim() - 1 - dim % soft.dim())) == largest
    return chosen.to(soft.dtype) - soft.detach() + soft


@implements(torch.Tensor.bernoulli_)
def bernoulli_(input: DistTensor, p: Any = 0.5, *, generator: Any = None) -> DistTensor:
    only_default("bernoulli_", generator, input)
    shape = tuple(input.shape)
    if not isinstance(p, Tensor):
        _check(torch.Tensor.bernoulli_, input.dtype, p)
    elif broadcast_shape("bernoulli_", (input, p)) != shape:
        raise RuntimeError(f"bernoulli_: p of shape {tuple(p.shape)} does not broadcast to {shape}")
    block = local_operand(p, shape, input.cuts, input.grid, "bernoulli_")
    drawn = _uniform(input)
    limit = _probabilities(block, "bernoulli_")
    return _written(input, (drawn < limit).to(input.dtype), "bernoulli_")


@implements(torch.Tensor.random_)
@_serial_in_parameters(torch.Tensor.random_)
def random_(input: DistTensor, *bounds: Any, generator: Any = None, **named: Any) -> DistTensor:
    only_default("random_", generator, input)
    _require_real("random_", input, input.dtype)
    _check(torch.Tensor.random_, input.dtype, *bounds, **named)
    given = (*bounds, *(named[name] for name in ("from", "to") if name in named))
    first = given[0] if len(given) == 2 else 0
    stop = given[-1] if given else None
    span = (_largest(input.dtype) + 1 if stop is None else stop) - first
    if span > 2**63:
        reason = f"a range of {span} integers is not supported"
        refuse("random_", reason, input, way_out="Choose one of 2**63 or fewer")
    if span <= 2**53:
        return _written(
            input, _integers(_uniform(input), input.dtype, first, first + span), "random_"
        )
    bits = _bits_at(global_numbers(input, input.dim()), new_key(input.grid))
    return _written(input, first + _right(bits, 1) % min(span, 2**63 - 1), "random_")


def _largest(dtype: torch.dtype) -> int:
    """Return the largest integer that torch's `random_()` draws for the type `dtype`."""
    if dtype == torch.bool:
        return 1
    return int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


_INITIALIZERS: dict[str, Callable[..., Tensor]] = {
    "constant_": lambda tensor, val: tensor.fill_(val),
    "normal_": lambda tensor, mean=0.0, std=1.0, generator=None: tensor.normal_(
        mean, std, generator=generator
    ),
    "uniform_": lambda tensor, a=0.0, b=1.0, generator=None: tensor.uniform_(
        a, b, generator=generator
    ),
}
for _name, _initializer in _INITIALIZERS.items():
    RULES[getattr(nn.init, _name)] = torch.no_grad()(_initializer)


@implements(nn.init.kaiming_uniform_)
@torch.no_grad()
def init_kaiming_uniform_(
    tensor: DistTensor,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Any = None,
) -> Tensor:
    """Fill `tensor` as torch.nn.init.kaiming_uniform_ does (He et al., ICCV 2015). Collective.

    The fan is computed from the global shape.
    """
    inward, outward = fans(tensor)
    fan = {"fan_in": inward, "fan_out": outward}[mode]
    bound = nn.init.calculate_gain(nonlinearity, a) * sqrt(3.0 / fan)  # type: ignore[arg-type]
    return tensor.uniform_(-bound, bound, generator=generator)


def only_default(name: str, generator: Any, input: Any) -> None:
    """Raise UnsupportedOperation if the function `name`, called on `input`, got a `generator`."""
    if generator is not None:
        reason = "a generator would need the same state on every rank"
        way_out = "Leave generator out; the numbers follow torch.manual_seed on rank 0"
        refuse(name, reason, input, way_out=way_out)
