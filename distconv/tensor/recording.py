"""Checks of operands before autograd records an operator; initial gradients of backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.comm import collectives
from distconv.comm.checksums import CURE, names_of, unequal
from distconv.comm.collectives import all_reduce_with_grad
from distconv.geometry.layout import Cuts, Shape, cutting_axes, rank_box, replicating_axes
from distconv.grid.interface import Grid
from distconv.grid.words import operator_name, user_line
from distconv.tensor.base import DistTensorBase, replaced, tensors_in
from distconv.tensor.dispatch import ADVICE_SERIAL, refuse
from distconv.tensor.ownership import OWNED, enter, origins, owned_among
from distconv.tensor.redistribution import redistribute
from distconv.torch_private import (
    count_modes,
    hooks_of,
    innermost_transform,
    is_traced_by_jit,
    make_fx_before_dispatch,
    tracing_mode,
    without_torch_function,
)

ADVICE_FOR_FUNCTIONS = (
    "Use torch functions, or wrap it in a function with a rule (distconv.elementwise, .windowed, "
    ".implements); create a grid before the program stores a Function's apply under another name"
)


def check_untraced(operator: Callable[..., Any] | str, *arguments: Any) -> None:
    """Raise UnsupportedOperation if a tool of torch is tracing or transforming the program.

    A traced graph would contain this rank's blocks without the messages. All ranks raise, as all
    run the same program. The error names `operator` and the tensors in `arguments`.
    """
    tool = "torch.jit.trace" if is_traced_by_jit() else ""
    if innermost_transform() is not None:
        tool = "one of torch.func's transforms"
    if count_modes():
        tool = tracing_mode() or tool
    if make_fx_before_dispatch() is not None:
        tool = "make_fx"
    if tool:
        refuse(
            operator_name(operator),
            f"{tool}, or a tool that uses it, is tracing or transforming the program, but cannot "
            "trace messages between ranks",
            *tensors_in(*arguments),
            way_out=ADVICE_SERIAL,
        )


def check_brought(operator: str, x: Tensor) -> None:
    """Raise UnsupportedOperation if `x`, to be distributed, depends on a parallelized parameter.

    The gradient of such a parameter would be counted once for every rank. The error names
    `operator`.
    """
    p = owned_among([x]) if x.requires_grad else None
    if p is not None:
        refuse(
            operator,
            f"the tensor {tuple(x.shape)} depends on a parameter of a parallelized module, of "
            f"shape {tuple(p.shape)}, whose gradient would be counted once for every rank",
            way_out="Pass parameters to operations with distributed tensors directly",
        )


_OF_SPARSE: set[Any] = {
    *(torch.mm, torch.mv, torch.matmul, torch.sparse.mm),
    *(torch.Tensor.mm, torch.Tensor.mv, torch.Tensor.matmul, torch.Tensor.__matmul__),
    torch.Tensor.__rmatmul__,
}
"""Functions that accept a plain sparse matrix together with distributed tensors."""

_OF_SPARSE_BATCHES: set[Any] = {torch.bmm, torch.Tensor.bmm}
"""Functions that accept a plain batch of sparse matrices together with distributed tensors."""


node_of_wrapper: Any = Tensor.grad_fn.__get__  # type: ignore[union-attr]
"""Return the autograd node that torch has recorded for a DistTensor instead of its shard, or None.

There is such a node only after a user's autograd Function was applied to a DistTensor."""


def common_grid(operator: Callable[..., Any] | str, operands: Iterable[Any]) -> Grid:
    """Return the one grid of all distributed operands.

    Raises ValueError, which names `operator`, if there are several grids, and
    `UnsupportedOperation` if there is none.
    """
    tensors = list(operands)
    grids = [x.grid for x in tensors if isinstance(x, DistTensorBase)]
    if not grids:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors if isinstance(x, Tensor))
        refuse(
            operator_name(operator),
            f"the operand {shapes} that determines the layout is a plain tensor",
            way_out="Distribute it, dc.distribute_tensor(x, grid)",
        )
    for grid in grids[1:]:
        if grid is not grids[0] and grid != grids[0]:
            raise ValueError(
                f"{operator_name(operator)}: the tensors are on different grids, {grids[0]} and "
                f"{grid}; create them on one grid"
            )
    return grids[0]


_OVERWRITING: set[Any] = {
    torch.Tensor.__setitem__,
    *(getattr(torch.Tensor, f"{name}_") for name in ("copy", "index_copy", "index_fill")),
    *(getattr(torch.Tensor, f"{name}_") for name in ("index_put", "put", "scatter")),
    *(getattr(torch.Tensor, f"masked_{name}_") for name in ("fill", "scatter")),
    *(torch.Tensor.fill_, torch.fill_, torch.index_put_),
}
"""Functions that overwrite their first argument, which may therefore be uninitialised memory."""

_ACCUMULATING = {torch.Tensor.index_put_, torch.Tensor.put_, torch.index_put_}
"""Functions that read their first argument if the fourth argument is accumulate=True."""

_OF_METADATA: set[Any] = {
    *(getattr(torch.Tensor, f"{name}_as") for name in ("expand", "reshape", "type", "view")),
    *(torch.Tensor.is_same_size, torch.Tensor.to, torch.is_same_size),
}
"""Functions that read only shape or type of plain operands, which may be uninitialised memory."""

_ADDED: set[Any] = {
    getattr(home, name)
    for name in ("addmm", "addmv", "baddbmm", "addbmm", "addr")
    for home, name in ((torch, name), (torch.Tensor, name), (torch.Tensor, f"{name}_"))
}
"""Functions that ignore their first argument with beta=0."""


MAY_IGNORE_FIRST = _OVERWRITING | _ADDED
"""The functions for which `ignores_first` may return True."""


def ignores_first(operator: Any, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return whether `operator(*args, **named)` reads no element of its first argument.

    To leave an element unchanged does not count as a read.
    """
    if operator in _ADDED:
        return named.get("beta") == 0
    adds = operator in _ACCUMULATING and (named.get("accumulate") or any(args[3:]))
    return operator in _OVERWRITING and not adds and named.get("reduce") is None


def check_recorded(
    operator: Callable[..., Any] | str,
    *operands: Any,
    compared: bool = True,
    unused_first: bool = False,
) -> dict[int, Tensor]:
    """Raise if the gradients of operands would be wrong; return replacements for plain operands.

    The gradient of a plain operand that depends on leaves outside of parallelized modules must be
    summed over the ranks. The result maps the id of such an operand to a replacement of equal
    values, whose gradient is summed.

    Raises UnsupportedOperation on every rank if a user's autograd Function was applied to a
    DistTensor itself, or a plain operand depends on a result of `to_local` or `full_tensor`.
    Raises ValueError if operands are on different grids, or if plain operands differ between ranks,
    unless `compared` is false. Errors name `operator`. With `unused_first` the first operand may
    differ between ranks. Collective if plain operands are compared.
    """
    distributed, lost = [], None
    with without_torch_function():
        for x in operands:
            if isinstance(x, DistTensorBase):
                distributed.append(x)
                if lost is None and node_of_wrapper(x) is not None:
                    lost = x
    if lost is not None:
        refuse(
            operator_name(operator),
            "a torch.autograd.Function was applied to a distributed tensor, which loses its "
            "gradients",
            lost,
            way_out=ADVICE_FOR_FUNCTIONS,
        )
    if len(distributed) > 1:
        common_grid(operator, distributed)
    entered: dict[int, Tensor] = {}
    if len(distributed) == len(operands):
        return entered
    plain = []
    for x in operands:
        if isinstance(x, DistTensorBase) or not isinstance(x, Tensor) or OWNED in x.__dict__:
            continue
        sparse = x.layout is not torch.strided
        dims = 3 if operator in _OF_SPARSE_BATCHES else 2 if operator in _OF_SPARSE else None
        if sparse and (x.requires_grad or x.dim() != dims):
            refuse(
                operator_name(operator),
                f"a tensor of layout {x.layout} is combined with distributed tensors",
                *operands,
                way_out="Use x.to_dense()",
            )
        plain.append(x)
        if x.requires_grad and _is_free(operator, x, operands):
            grid = distributed[0].grid if distributed else None
            if grid is not None and grid.size > 1 and torch.is_grad_enabled():
                # torch allows a scalar on the CPU beside tensors on a GPU.
                entered[id(x)] = enter(x if x.dim() else x.to(grid.device), grid)
    if unused_first and plain and plain[0] is operands[0]:
        del plain[0]
    if plain and compared and operator not in _OF_METADATA:
        _check_plain(operator, plain, distributed)
    return entered


def recorded(operator: Callable[..., Any] | str, arguments: Any, compared: bool = True) -> Any:
    """Check operands by `check_recorded`, and return `arguments` with its replacements.

    For operators that torch does not pass to the rules of DistTensors. Errors name `operator`.
    """
    entered = check_recorded(operator, *tensors_in(arguments), compared=compared)
    return replaced(arguments, entered) if entered else arguments


def _is_free(operator: Callable[..., Any] | str, x: Tensor, operands: tuple[Any, ...]) -> bool:
    """Return whether the plain operand `x` depends on leaves outside of parallelized modules.

    The gradient of such an operand must be summed over the ranks. Raises UnsupportedOperation if
    `x` depends both on such leaves and on parallelized parameters, or on a result of `to_local` or
    `full_tensor`. The error names `operator`.
    """
    found = origins([x.grad_fn], remember=True) if x.grad_fn is not None else {"free": x}
    if "out" in found:
        refuse(
            operator_name(operator),
            f"the plain tensor {tuple(x.shape)} depends on a result of to_local() or "
            "full_tensor(), and is combined with distributed tensors",
            *operands,
            way_out="Use x.redistribute(Layout()) to replicate it on every rank, or convert it "
            "back by distribute_tensor or DistTensor.from_local",
        )
    if "free" in found and "owned" in found:
        shapes = (tuple(found[kind].shape) for kind in ("owned", "free"))
        refuse(
            operator_name(operator),
            "the plain tensor {} depends on a parameter of a parallelized module, of shape {}, "
            "and on a leaf outside of it, of shape {}, whose gradients are summed elsewhere".format(
                tuple(x.shape), *shapes
            ),
            *operands,
            way_out="Combine each with distributed tensors separately, for example loss + "
            "penalty(model) + penalty(head), or put both into one module before parallelize",
        )
    if "owned" in found and x.grad_fn is not None and (hooks_of(x) or x.retains_grad):
        refuse(
            operator_name(operator),
            f"the plain tensor {tuple(x.shape)} depends on a parameter of a parallelized module, "
            "and has a hook or retains its gradient, which would be only this rank's part",
            *operands,
            way_out="Register the hook on the parameter, or call torch.autograd.grad(loss, x)",
        )
    return "free" in found


def _check_plain(
    operator: Callable[..., Any] | str, plain: list[Tensor], distributed: list[DistTensorBase]
) -> None:
    """Compare plain operands of `operator` between ranks; raise ValueError if they differ.

    Operands are compared in the first 16 calls of an operator, and in every 64th later. Parameters
    of parallelized modules are not in `plain`; `ModuleGuard` compares parameters. Collective.
    """
    x = next(iter(distributed), None)
    if x is None or x.grid.size == 1:
        return
    # One rank alone may compute with a replicated tensor, for example to print it.
    if not (any(x.cuts) or x.held.requires_grad):
        return
    if not x.grid.journal.is_due((operator, x.shape), x.grid.device):
        return
    found = unequal(names_of(plain), x.grid)
    if found:
        name, ranks = found
        raise ValueError(
            f"{operator_name(operator)} at {user_line()}: a plain tensor, {name}, is not the same "
            f"on all ranks: {ranks}. Plain tensors must have the global shape and equal values: "
            f"{CURE}; turn blocks into a DistTensor by DistTensor.from_local"
        )


def gradient_seed(x: DistTensorBase, gradient: Tensor | None, operator: str) -> Tensor:
    """Return this rank's summand of the gradient with which a backward pass starts at `x`.

    The summand is the block of `gradient` (1 by default), divided by the number of ranks that hold
    the block, as the gradient is the sum over these ranks. Collective. Errors name `operator`.
    """
    check_recorded(operator, x)
    check_untraced(operator, x)
    if gradient is None:
        if x.numel() != 1:
            raise RuntimeError(
                f"{operator}: grad can be implicitly created only for scalar outputs, not for "
                f"shape {tuple(x.shape)}; pass the gradient"
            )
        return torch.full_like(x.shard, 1 / x.replicas)
    return gradient_part(gradient, tuple(x.shape), x.cuts, x.grid, operator)


def gradient_part(gradient: Tensor, shape: Shape, cuts: Cuts, grid: Grid, operator: str) -> Tensor:
    """Return this rank's summand of `gradient`, of global shape `shape`, partitioned by `cuts`.

    `gradient` is a DistTensor, or a plain tensor equal on all ranks. The result is this rank's
    block, divided by the number of ranks that hold the block. Collective. Errors name `operator`.
    """
    check_recorded(operator, gradient)
    if gradient.shape != shape:
        raise RuntimeError(
            f"{operator}: gradient has shape {tuple(gradient.shape)}, expected {shape}"
        )
    replicas = grid.size // grid.topology.parts(cutting_axes(cuts))
    if not isinstance(gradient, DistTensorBase):
        whole = collectives.replicate(gradient, grid, replicating_axes((), grid.topology))
        return whole[rank_box(shape, cuts, grid.topology, grid.rank).slices] / replicas
    if gradient.grid is not grid and gradient.grid != grid:
        raise ValueError(
            f"{operator}: the gradient is on {gradient.grid}, but the tensor is on {grid}; create "
            "them on one grid"
        )
    own = redistribute(gradient, cuts, operator).shard
    return own / replicas if replicas > 1 else own


def whole_gradient(part: Tensor, cuts: Cuts, grid: Grid) -> Tensor:
    """Return the sum of `part`, this rank's summand of a gradient, over the replicas of its block.

    `cuts` are the grid axes that partition each dimension. Differentiable. Collective.
    """
    return all_reduce_with_grad(part, grid, replicating_axes(cuts, grid.topology))
