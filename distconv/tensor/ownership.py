"""Ownership of parameters by parallelized modules, which sum the gradients over ranks.

Operators on distributed tensors compute this rank's summand of the gradient of a parameter, and the
parallelized module sums these gradients over ranks. A leaf outside of such modules must get the
serial gradient from autograd. So the gradient of a plain operand that depends on such a leaf is
summed over ranks by an autograd node before the operator (`enter`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from distconv.comm import collectives
from distconv.grid.interface import Grid
from distconv.tensor.plain_copies import let_follow
from distconv.torch_private import ShardFunction, roots_of_backward

OWNED = "_distconv_owned"
"""The name of the attribute that marks a parameter or buffer of a parallelized module.

Its value is the number of ranks of the module's grid."""

_SUMMED = "_distconv_summed"
"""The name of the attribute that marks a parameter whose hooks get the gradient summed over ranks.
"""

_ORIGINS = "distconv_origins"
"""The key under which an autograd node caches the result of `origins`."""

_UNDECLARED = "distconv_undeclared"
"""The key by which the metadata of an autograd node mark a result of `undeclared`."""

_DISTRIBUTED: list[list[Tensor]] = []
"""For each running backward pass, the blocks of distributed tensors at which it has started."""


def own(tensors: Iterable[Tensor], ranks: int) -> None:
    """Mark parameters and buffers as those of a module that is parallelized over `ranks` ranks."""
    for x in tensors:
        x.__dict__[OWNED] = ranks


def disown(tensors: Iterable[Tensor]) -> None:
    """Remove the marks of a module's parameters and buffers, set by `own` and `mark_summed`."""
    for x in tensors:
        x.__dict__.pop(OWNED, None)
        x.__dict__.pop(_SUMMED, None)


def is_owned(x: Tensor) -> bool:
    """Return whether a tensor is a parameter or buffer of a parallelized module, on any grid."""
    return OWNED in x.__dict__


def is_shared(x: Tensor) -> bool:
    """Return whether `x` belongs to a module that is parallelized over several ranks."""
    several: bool = x.__dict__.get(OWNED, 1) > 1
    return several


def own_alike(y: Tensor, x: Tensor) -> None:
    """Mark `y`, a copy of `x` in another type, as owned by the module of `x`, if there is one."""
    if OWNED in x.__dict__:
        y.__dict__[OWNED] = x.__dict__[OWNED]


def mark_summed(p: Tensor, summed: bool) -> None:
    """Record whether hooks on `p` get the gradient summed over ranks, or this rank's summand."""
    p.__dict__[_SUMMED] = summed


def is_summed(p: Tensor) -> bool:
    """Return whether hooks on `p` get its gradient summed over the ranks; see `mark_summed`."""
    return p.__dict__.get(_SUMMED, False)


def origins(
    nodes: Iterable[Any], remember: bool = False, beyond: Iterable[Any] = ()
) -> dict[str, Any]:
    """Return the kinds of tensors on which the autograd `nodes` depend through plain tensors.

    The result has one example of each kind found. "owned": a parameter of a module that is
    parallelized over several ranks. "free": any other leaf. "out": the node of a plain tensor that
    `to_local` or `full_tensor` returned. "block": the node of `undeclared`, also an "out".
    "entered": the node of a plain operand whose gradient is summed already.

    Parameters
    ----------
    remember: whether the nodes cache the result for later calls.
    beyond: nodes at which the search stops, and which it ignores.
    """
    found: dict[str, Any] = {}
    seen: set[Any] = set(beyond)
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found["owned" if is_shared(leaf) else "free"] = leaf
        elif collectives.OPERAND in node.metadata:
            found["entered"] = node
        elif collectives.HANDED_OUT in node.metadata:
            found["out"] = node
            if _UNDECLARED in node.metadata:
                found["block"] = node
        elif remember and _ORIGINS in node.metadata:
            found |= node.metadata[_ORIGINS]
        else:
            waiting.extend(following for following, _ in node.next_functions)
    if remember and len(found) == 1:
        for node in seen:
            node.metadata[_ORIGINS] = found
    return found


def owned_among(roots: Iterable[Tensor]) -> Tensor | None:
    """Return a parameter of a parallelized module on which one of `roots` depends, or None.

    Only modules parallelized over several ranks count, and only dependences through plain tensors:
    the search stops at results of functions on distributed tensors.
    """
    nodes = [get_gradient_edge(x).node for x in roots if x.requires_grad]
    p: Tensor | None = origins(nodes).get("owned")
    return p


def meets(roots: Iterable[Tensor], x: Tensor) -> bool:
    """Return whether one of `roots` depends on `x` by a path that does not contain `replicate`."""
    return reaches(roots, x, lambda node: collectives.REPLICATED in node.metadata)


def reaches(
    roots: Iterable[Tensor], x: Tensor, ends: Callable[[Any], bool] = lambda node: False
) -> bool:
    """Return whether one of `roots` depends on `x` by a path of nodes for which `ends` is false."""
    edge = get_gradient_edge(x)[:2]
    seen: set[Any] = set()
    waiting: list[Any] = [root.grad_fn for root in roots]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or ends(node):
            continue
        seen.add(node)
        if edge in node.next_functions:
            return True
        waiting.extend(following for following, _ in node.next_functions)
    return False


def enter(plain: Tensor, grid: Grid) -> Tensor:
    """Return `plain`, equal on all ranks, as an operand whose gradient is summed over the ranks.

    `plain` must not depend on parameters of parallelized modules, whose gradients the modules sum.
    The backward pass raises RuntimeError if `plain` does. Collective.
    """
    operand = collectives.as_replicated(plain, grid)
    let_follow(operand, plain)
    operand.register_hook(partial(_check_not_owned, get_gradient_edge(plain).node))
    return operand


def _check_not_owned(node: Any, _: Tensor | None) -> None:
    p = origins([node]).get("owned")
    if p is not None:
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} met distributed tensors before its module was "
            "parallelized, so its gradient would be summed twice; call parallelize(model, grid) "
            "before the forward pass"
        )


class distributed_roots:
    """A context that declares the blocks of distributed tensors at which a backward pass starts.

    All other tensors at which the backward pass starts count as plain.
    """

    __slots__ = ("_shards",)

    def __init__(self, shards: list[Tensor]):
        self._shards = shards

    def __enter__(self) -> None:
        _DISTRIBUTED.append(self._shards)

    def __exit__(self, *_: object) -> None:
        _DISTRIBUTED.pop()


def plain_roots() -> list[Tensor]:
    """Return the plain tensors at which the running backward pass started."""
    known = set(map(id, chain.from_iterable(_DISTRIBUTED)))
    return [x for x in roots_of_backward() if id(x) not in known]


def undeclared(block: Tensor, whose: str) -> Tensor:
    """Return `block` of a partitioned tensor, marked so that no plain loss may depend on it.

    The gradients of the ranks' losses would be summed, and be too large if each loss is a mean over
    its block. So a backward pass that reaches the block from a plain tensor raises RuntimeError. A
    backward pass from a distributed tensor does not raise. `whose` describes the partitioned tensor
    for the message.
    """
    if not block.requires_grad:
        return block
    result = _Undeclared.apply(block, whose)
    if result.grad_fn is not None:
        result.grad_fn.metadata[_UNDECLARED] = True
    return collectives.mark_handed_out(result)


class _Undeclared(ShardFunction):
    @staticmethod
    def forward(ctx: Any, block: Tensor, whose: str) -> Tensor:
        ctx.whose = whose
        return collectives.alias(block)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        nodes = [get_gradient_edge(x).node for x in plain_roots() if x.requires_grad]
        if "block" in origins(nodes):
            raise RuntimeError(
                "backward: a plain loss depends on to_local() of the partitioned tensor "
                f"{ctx.whose}. Every rank has the loss of its own block, and the gradients of all "
                "ranks are summed: gradients of means over blocks would be too large by a factor "
                "of the number of blocks. Compute the loss on the distributed tensor itself, "
                "loss_function(model(x), target), or on full_tensor(). If the serial loss is the "
                'sum of the losses of the ranks, write to_local(grad="part")'
            )
        return grads[0], None


def check_counted_once() -> None:
    """Raise RuntimeError if a plain loss of the running backward pass depends on owned parameters.

    An owned parameter belongs to a parallelized module. Every rank would compute its whole
    gradient, and the sum over ranks would be too large.
    """
    p = owned_among(plain_roots())
    if p is not None:
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} of a parallelized module is part of a plain "
            "loss with no distributed tensor between them: each rank would count the gradient "
            "once, and the sum over ranks would be too large. Add the term to the distributed "
            "loss before backward(): (loss + penalty).backward(), where loss is the result of a "
            "loss function, or a sum, of the model's output without full_tensor()"
        )
