"""Weights sharded over the grid's sample axis, and gathered only while their module computes.

A sharded weight is a DistTensor partitioned over the grid's sample axis, so each rank of P_N
replicas keeps 1/P_N of the weight, of its gradient and of its optimizer state (Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020). A module gathers
its weights when it is called. The adjoint of the gathering sums the gradients over the sample axis,
and leaves each rank the gradient of its block. `gradient_reduction` sums over the other axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import swap_tensors

from distconv.comm.transfer import Transfer
from distconv.geometry.index_maps import Same
from distconv.grid.process_grid import ProcessGrid
from distconv.model.layouts import sharded
from distconv.tensor.dispatch import SerialTrace
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import gather_inputs, plan_to_gather
from distconv.torch_private import (
    address_of_memory,
    innermost_saved_hooks,
    parts_and_parameters,
    run_eagerly,
)

SHARDS = ("zero2", "zero3")
"""The values of `shard` in `parallelize`. With "zero2", gathered weights are kept from the forward
pass to the backward pass; with "zero3", the backward pass gathers the weights again."""

_AXIS = "sample"


def shard_over_samples(module: nn.Module, grid: ProcessGrid) -> set[Tensor]:
    """Partition a module's weights over the grid's sample axis in place, and return the weights.

    Each weight becomes a DistTensor partitioned along its longest dimension. Left unchanged are
    vectors, such as biases, which have few elements but would need as many messages; weights that
    are DistTensors already; and weights of recurrent layers, which do not read their weights by
    name. No communication.
    """
    found: set[Tensor] = set()
    if grid.shape[_AXIS] == 1:
        return found
    kept = {
        p for part in module.modules() if isinstance(part, nn.RNNBase) for p in part.parameters()
    }
    for p in list(module.parameters()):
        if p.dim() > 1 and p not in kept and not isinstance(p, DistTensor):
            longest = max(range(p.dim()), key=p.shape.__getitem__)
            cuts = tuple((_AXIS,) if d == longest else () for d in range(p.dim()))
            # Other holders of the parameter, such as an optimizer, hold its block from now on.
            swap_tensors(p, sharded(p, cuts, grid))
            found.add(p)
    return found


def gather_in_calls(module: nn.Module, weights: set[Tensor], again: bool) -> None:
    """Register hooks by which `module` and its submodules gather their weights when called.

    `weights` is the result of `shard_over_samples`. If `again` is true, the backward pass gathers
    the weights again, as in "zero3".
    """
    for part in module.modules():
        # Attention computes with the weights of its output layer, which it does not call.
        owners = part.modules() if isinstance(part, nn.MultiheadAttention) else [part]
        names = [
            (owner, name)
            for owner in owners
            for name, p in owner.named_parameters(recurse=False)
            if p in weights
        ]
        if names:
            GatheredWeights(part, names, again)


class _Gathered:
    """A gathered weight, with its block and the transfer to gather the weight again. Collective."""

    def __init__(self, weight: Tensor, p: DistTensor):
        self.weight, self.block, self.version = weight, p.shard, p.shard._version
        shape, same, whole = tuple(p.shape), (Same(),) * p.dim(), ((),) * p.dim()
        plan = plan_to_gather(p.grid.topology, p.grid.rank, shape, p.cuts, same, whole)
        assert plan is not None
        # Made here, as the backward passes of the ranks may differ.
        self.transfer = Transfer(plan, p.grid)

    def holds(self, x: Tensor) -> bool:
        """Return whether `x` is a view of the gathered weight, or its copy in another type.

        False for a view with other values or another type, such as the conjugate or the real part.
        """
        if address_of_memory(x) == address_of_memory(self.weight):
            return x.dtype == self.weight.dtype and not (x.is_conj() or x.is_neg())
        node: Any = x.grad_fn
        if node is None or node.name() != "ToCopyBackward0" or x.stride() != self.weight.stride():
            return False
        return node.next_functions[0][0] is self.weight.grad_fn


class _Saved(NamedTuple):
    """The record that autograd saves instead of a gathered weight, to gather the weight again."""

    block: Tensor
    version: int
    """The version counter of `block` in the forward pass; each in-place write increments the
    counter."""
    transfer: Transfer
    view: tuple[Any, Any, Any]
    """The shape, strides and offset of the saved tensor in the gathered weight."""
    dtype: torch.dtype

    def gathered(self) -> Tensor:
        """Gather the weight again, and return the saved view of the weight. Collective."""
        if self.block._version != self.version:
            raise RuntimeError(
                f"backward: a weight of shape {tuple(self.transfer.plan.buffer_shape)} has been "
                "written since the forward pass, and shard='zero3' would gather its new elements; "
                "run the backward pass before the optimizer's step"
            )
        with torch.no_grad():
            # Autocast's copies are gathered in their own type.
            whole = self.transfer.forward(self.block.detach().to(self.dtype))
            return whole.as_strided(*self.view)


class _OpenCall(NamedTuple):
    """A module call in progress: gathered weights, their states, and hooks for saved tensors."""

    weights: list[Tensor]
    states: list[Any]
    hooks: saved_tensors_hooks | None
    found: list[_Gathered]


class GatheredWeights:
    """The forward hooks of a module that gather its sharded weights for each call.

    During a call each attribute in `names`, such as (module, "weight"), is the gathered weight
    instead of the parameter. If `again` is true, autograd saves no gathered weight: the backward
    pass gathers a weight again where the weight is used.
    """

    def __init__(self, module: nn.Module, names: Sequence[tuple[nn.Module, str]], again: bool):
        self._names, self._again = names, again
        self._open: list[_OpenCall] = []
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, _: Any) -> None:
        if not SerialTrace.under_way:
            self._gather()

    @run_eagerly
    def _gather(self) -> None:
        blocks = [parts_and_parameters(owner)[0][name] for owner, name in self._names]
        weights = [_gathered(p) for p in blocks]
        for (owner, name), weight in zip(self._names, weights, strict=True):
            vars(owner)[name] = weight
        hooks: saved_tensors_hooks | None = None
        found: list[_Gathered] = []
        if self._again and torch.is_grad_enabled():
            found += [_Gathered(*each) for each in zip(weights, blocks, strict=True)]
            hooks = saved_tensors_hooks(*_hooks(found))
            hooks.__enter__()
        self._open.append(_OpenCall(weights, list(map(_state, weights)), hooks, found))

    def _after(self, module: nn.Module, _: Any, __: Any) -> None:
        for owner, name in self._names:
            vars(owner).pop(name, None)
        if not self._open:
            return
        call = self._open.pop()
        if call.hooks is not None:
            call.hooks.__exit__()
            call.found.clear()  # autograd keeps the hooks
        if list(map(_state, call.weights)) != call.states:
            raise RuntimeError(
                f"{type(module).__name__} writes to a weight while it is called, which shard= "
                "gathers for the call only, so the write would be lost; write to the parameter "
                "before or after the call, or parallelize without shard="
            )


def _state(weight: Tensor) -> Any:
    """Return address and version of `weight`, which differ after a write to it or its `data`."""
    return address_of_memory(weight), None if weight.is_inference() else weight._version


def _gathered(p: DistTensor) -> Tensor:
    """Return the global tensor of the sharded weight `p`, differentiably. Collective."""
    return gather_inputs(p, (Same(),) * p.dim(), ((),) * p.dim(), "shard")


def _hooks(found: Sequence[_Gathered]) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return pack and unpack hooks by which autograd does not save the gathered weights `found`.

    Other tensors are passed to the enclosing hooks, such as the hooks of `save_on_cpu` or of a
    checkpoint.
    """
    pack, unpack = innermost_saved_hooks() or (lambda x: x, lambda x: x)

    def save(x: Tensor) -> Any:
        for whole in found:
            if whole.holds(x):
                view = x.shape, x.stride(), x.storage_offset()
                return _Saved(whole.block, whole.version, whole.transfer, view, x.dtype)
        return pack(x)

    def restore(saved: Any) -> Tensor:
        return saved.gathered() if isinstance(saved, _Saved) else unpack(saved)

    return save, restore
