"""Random numbers whose distribution depends on a tensor: torch.normal, multinomial, poisson, ...

Any process grid draws the same numbers. They are hashes of positions in the result, as in
`distconv.ops.random`, or are drawn on rank 0. The rank that holds a parameter out of range raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from distconv.comm.collectives import broadcast
from distconv.ops.math.pointwise import pointwise_rule
from distconv.ops.random import only_default
from distconv.ops.support.arguments import check_on_meta
from distconv.ops.support.operands import (
    as_distributed,
    broadcast_cuts,
    common_grid,
    gather_whole,
    uncut,
)
from distconv.tensor.dispatch import RULES, implements
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import redistribute
from distconv.torch_private import (
    assert_async,
    dirichlet_grad,
    sample_dirichlet,
    standard_gamma,
    standard_gamma_grad,
)


def _with_zero_gradient(drawn: Tensor, *parameters: Any) -> Tensor:
    """Return the random numbers `drawn`, with a gradient of 0 for `parameters`, as in torch."""
    for x in parameters:
        if isinstance(x, Tensor) and x.requires_grad:
            everywhere = torch.ones((), dtype=torch.bool, device=x.device)
            drawn = drawn + x.masked_fill(everywhere, 0)
    return drawn


@implements(torch.normal)
def normal(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Tensor:
    """Return normal random numbers; `mean` and `std` are broadcast together. Collective."""
    only_default("normal", generator, mean if isinstance(mean, DistTensor) else std)
    check_on_meta(torch.normal, mean, std)
    if isinstance(std, Tensor):
        assert_async((std.detach() >= 0).all(), "normal: std has negative elements")
    center, width = (x.detach() if isinstance(x, Tensor) else x for x in (mean, std))
    drawn = center + width * torch.randn_like(center + width)
    return _with_zero_gradient(drawn.to(_type(mean, std)), mean, std)


def _type(*parameters: Any) -> torch.dtype:
    """Return the type of the first tensor among `parameters`."""
    return next(x.dtype for x in parameters if isinstance(x, Tensor))


@implements(torch.poisson)
def poisson(input: DistTensor, generator: Any = None) -> Tensor:
    """Return Poisson random numbers of the rates `input`, by inversion. Collective."""
    only_default("poisson", generator, input)
    check_on_meta(torch.poisson, input)
    x: Any = input.detach()
    assert_async((x >= 0).all(), "poisson: a rate is negative or NaN; expected 0 or more")
    rate, u = x.double(), cast(Any, torch.rand_like(x, dtype=torch.float64))
    counts = _poisson_quantile(rate.shard, u.shard)
    return _with_zero_gradient(DistTensor(counts.to(x.dtype), x.shape, x.cuts, x.grid), input)


def _poisson_quantile(rate: Tensor, u: Tensor) -> Tensor:
    """Return, for each rate, the least count whose cumulative Poisson probability is above `u`.

    `u` is in [0, 1).
    """
    below = torch.full_like(rate, -1)
    # The probability beyond ten standard deviations rounds to 0.
    count = (rate + 10 * rate.sqrt() + 40).ceil()
    while (count - below > 1).any():
        middle = ((below + count) / 2).floor()
        above = torch.special.gammaincc(middle + 1, rate) > u
        below, count = torch.where(above, below, middle), torch.where(above, middle, count)
    return count


@implements(torch.multinomial, Tensor.multinomial)
def multinomial(
    input: DistTensor, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    """Return categories drawn by the weights along the last dimension of `input`. Collective.

    The last dimension is gathered on every rank.
    """
    only_default("multinomial", generator, input)
    # On the meta device torch checks nothing.
    one_row = torch.ones([1] * (input.dim() - 1) + list(input.shape[-1:]), dtype=input.dtype)
    torch.multinomial(one_row, num_samples, replacement, generator=torch.Generator())
    weights = uncut(cast(DistTensor, input.detach()), [input.dim() - 1], "multinomial").double()
    message = "multinomial: weights must be finite and 0 or more, and their sums positive"
    valid = ((weights >= 0) & (weights < torch.inf)).all() & (weights.sum(-1) > 0).all()
    assert_async(valid, message)
    if not replacement:
        # The categories with the least exponential waiting times, whose rates are the weights.
        wait = -torch.log1p(-torch.rand_like(weights))
        return (weights / wait.clamp_min(2.0**-54)).topk(num_samples).indices
    ends = weights.cumsum(-1)
    drawn = torch.rand_like(ends[..., :1].expand(*ends.shape[:-1], num_samples))
    return torch.searchsorted(ends, drawn * ends[..., -1:], right=True)


def _drawn_whole(function: Callable[..., Tensor]) -> Callable[..., DistTensor]:
    """Return a function that draws as `function` does, with rank 0's numbers on all ranks.

    All ranks gather the parameters. The result is partitioned as the parameters. Collective.
    """
    name = function.__name__

    def draw(*parameters: Tensor, generator: Any = None) -> DistTensor:
        only_default(name, generator, parameters[0])
        grid = common_grid(name, parameters)
        drawn = function(*(gather_whole(x, name).detach() for x in parameters))
        broadcast(drawn, grid)
        largest = broadcast_cuts([as_distributed(x, grid) for x in parameters], drawn.shape)
        return redistribute(as_distributed(drawn, grid), largest, name)

    return draw


_binomial, _gamma = _drawn_whole(torch.binomial), _drawn_whole(standard_gamma)
RULES[sample_dirichlet] = _drawn_whole(sample_dirichlet)
for _derivative in (standard_gamma_grad, dirichlet_grad):
    RULES[_derivative] = pointwise_rule(_derivative)


@implements(torch.binomial)
def binomial(count: Tensor, prob: Tensor, generator: Any = None) -> Tensor:
    """Return binomial random numbers, drawn on rank 0 from gathered parameters. Collective."""
    return _with_zero_gradient(_binomial(count, prob, generator=generator), count, prob)


@implements(standard_gamma)
def gamma(input: DistTensor, generator: Any = None) -> Tensor:
    """Return gamma random numbers, drawn on rank 0 from the gathered tensor. Collective.

    The gradient is computed by each rank for its own block.
    """
    drawn = _gamma(input, generator=generator)
    if not input.requires_grad:
        return drawn
    x = input.detach()
    return drawn + (input - x) * standard_gamma_grad(x, drawn)
