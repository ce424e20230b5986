"""torch.autograd.backward and torch.autograd.grad, hooks and deep copies for DistTensors.

Autograd records operations on the shards, while users see global tensors. The gradient of a
replicated value, plain tensors included, is the sum over its replicas. The functions here return
this sum. If a value is replicated, they therefore communicate in the backward pass, in the order of
the graph, which is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from distconv.comm.collectives import all_reduce, replicate
from distconv.geometry.layout import Cuts, replicating_axes
from distconv.geometry.topology import AXES
from distconv.grid.interface import Grid
from distconv.ops.support.operands import common_grid, shard_of
from distconv.tensor.base import Tensors, as_list, shards_of
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor, as_parameter
from distconv.tensor.ownership import distributed_roots, is_summed, meets, owned_among, reaches
from distconv.tensor.recording import gradient_seed, whole_gradient
from distconv.tensor.redistribution import redistribute

GradientArguments = Tensor | Sequence[Tensor | None] | None


def _seeds(
    tensors: Sequence[Tensor], gradients: GradientArguments, operator: str
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the shards of `tensors`, and the gradient block with which backward starts at each.

    The gradient block of a replicated tensor is divided by the number of replicas, because autograd
    sums over the replicas. `operator` is the name of the called function, for error messages.
    Raises RuntimeError unless there is one gradient for each tensor, or none at all.
    """
    given: Sequence[Tensor | None]
    if gradients is None:
        given = [None] * len(tensors)
    else:
        given = [gradients] if isinstance(gradients, Tensor) else list(gradients)
    if len(given) != len(tensors):
        raise RuntimeError(
            f"{operator}: got {len(tensors)} tensors and {len(given)} gradients; pass one for "
            "each tensor"
        )
    seeds = [
        gradient_seed(x, gradient, operator) if isinstance(x, DistTensor) else gradient
        for x, gradient in zip(tensors, given, strict=True)
    ]
    return list(map(shard_of, tensors)), seeds


@implements(torch.autograd.backward)
def backward(
    tensors: Tensors,
    grad_tensors: GradientArguments = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: GradientArguments = None,
    inputs: Tensors | None = None,
) -> None:
    """Add the gradients of `tensors` to the `.grad` of the leaves. Collective."""
    gradients = grad_variables if grad_tensors is None else grad_tensors
    roots = as_list(tensors)
    shards, seeds = _seeds(roots, gradients, "backward")
    leaves = None if inputs is None else shards_of(inputs)
    with distributed_roots([x.shard for x in roots if isinstance(x, DistTensor)]):
        torch.autograd.backward(shards, seeds, retain_graph, create_graph, inputs=leaves)


@implements(torch.autograd.grad)
def grad(
    outputs: Tensors,
    inputs: Tensors,
    grad_outputs: GradientArguments = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradient of the outputs' sum for each input, equal to serial torch's. Collective.

    The gradient of a DistTensor is a DistTensor of its layout. The gradient of a plain tensor,
    equal on all ranks, is a plain tensor; with `create_graph` it is a replicated DistTensor, so
    that it can be differentiated again.
    """
    roots, wanted = as_list(outputs), as_list(inputs)
    grid = common_grid("grad", [*roots, *wanted])
    if is_grads_batched:
        way_out = "Call it once for each gradient"
        refuse("grad", "is_grads_batched is not supported", *roots, way_out=way_out)
    plain = (x for x in wanted if not isinstance(x, DistTensor))
    if owned_among(plain) is not None and not all(isinstance(x, DistTensor) for x in roots):
        refuse(
            "grad",
            "of a plain output, the gradient of a parameter of a parallelized module may be a part "
            "of a sum over the ranks or the sum itself",
            *wanted,
            way_out="Compute the output on DistTensors, x.redistribute(Layout()) if need be",
        )
    shards, seeds = _seeds(roots, grad_outputs, "grad")
    # This searches the graph, which the backward pass frees.
    met = [create_graph and not isinstance(x, DistTensor) and meets(shards, x) for x in wanted]
    leaves = shards_of(wanted)
    gradients = torch.autograd.grad(
        shards, leaves, seeds, retain_graph, create_graph, allow_unused=True
    )
    allow_unused = materialize_grads if allow_unused is None else allow_unused
    parts = [
        _part_of_leaf(shards, leaf, part, allow_unused)
        for leaf, part in zip(leaves, gradients, strict=True)
    ]
    if create_graph and grid.size > 1:
        parts = _recorded_alike(parts, leaves, grid)

    def whole(x: Tensor, part: Tensor | None, met: bool) -> Tensor | None:
        if part is None:
            return torch.zeros_like(x) if materialize_grads else None
        if isinstance(x, DistTensor):
            y = x.stored
            # The hook of a replicated leaf has summed the gradient already.
            total = part if y.summed_by == "hook" else whole_gradient(part, y.cuts, grid)
            gradient = DistTensor(total, y.shape, y.cuts, grid)
            return gradient if y is x else gradient.reshape(x.shape)
        # Other gradients were summed where a plain tensor met distributed ones, or became one.
        cuts: Cuts = ((),) * x.dim()
        if owned_among([x]) is not None:
            # The hooks of the parameter get the sum.
            total = part if is_summed(x) else whole_gradient(part, cuts, grid)
        elif met:
            total = replicate(part, grid, replicating_axes(cuts, grid.topology))
        else:
            return part
        return DistTensor(total, x.shape, cuts, grid) if create_graph else total

    return tuple(map(whole, wanted, parts, met))


def _part_of_leaf(
    shards: Sequence[Tensor], leaf: Tensor, part: Tensor | None, allow_unused: bool
) -> Tensor | None:
    """Return `part`, this rank's gradient of `leaf`, or zeros if torch left it out.

    A `part` of None is replaced by zeros if the graph of the outputs, whose blocks are `shards`,
    reaches `leaf`. If the graph does not, return None with `allow_unused`, and raise RuntimeError
    without `allow_unused`.
    """
    if part is not None:
        return part
    # torch may leave out gradients of blocks without elements that other ranks have.
    if reaches(shards, leaf):
        return torch.zeros_like(leaf)
    if not allow_unused:
        raise RuntimeError(
            f"grad: an input of shape {tuple(leaf.shape)} appears to not have been used in the "
            "graph of the outputs; set allow_unused=True to have None for it"
        )
    return None


def _recorded_alike(
    parts: Sequence[Tensor | None], leaves: Sequence[Tensor], grid: Grid
) -> list[Tensor | None]:
    """Return the gradients `parts` of `leaves`, each with a graph on all ranks or none. Collective.

    With `create_graph`, a rank whose block has no elements, or was overwritten in full, has a
    constant gradient even if the gradient of another rank can be differentiated again. Such a rank
    adds the sum of no elements of the leaf, which is 0 and has a graph.
    """
    recorded = [part is not None and part.requires_grad for part in parts]
    counts = torch.tensor(recorded, dtype=torch.float64, device=grid.device)
    somewhere = all_reduce(counts, grid, AXES).tolist()
    return [
        # The sum over no elements is zero, whatever the other factors are.
        part + leaf.reshape(-1)[:0].sum() if part is not None and ranks and not own else part
        for part, leaf, ranks, own in zip(parts, leaves, somewhere, recorded, strict=True)
    ]


@implements(torch.Tensor.register_hook)
def register_hook(
    self: DistTensor, hook: Callable[[DistTensor | None], Tensor | None]
) -> RemovableHandle:
    """Let each backward pass call `hook` with the tensor's gradient, on all ranks together.

    The hook may return another gradient to use instead. The result is a handle that removes the
    hook.
    """
    stored, shape = self.stored, self.shape
    handle = _hook_block(stored, hook if stored is self else _in_shape(hook, shape, stored.shape))
    if self.gradient_hook is not None:
        # The retained gradient is the result of the last hook.
        self.gradient_hook.remove()
        self.gradient_hook = None
        self.gradient_hook = _keep(self)
    return handle


def _hook_block(
    self: DistTensor, hook: Callable[[DistTensor | None], Tensor | None]
) -> RemovableHandle:
    """Register `hook` for the gradient of `self`, whose blocks the ranks hold.

    The hook gets the gradient summed over replicas. All ranks call the hook together in the
    backward pass.
    """
    # No reference to the tensor itself: its graph would keep it alive.
    shape, cuts, grid, replicas = self.shape, self.cuts, self.grid, self.replicas
    block, dtype, device = self.shard.shape, self.dtype, self.device
    # The hook of a replicated leaf has summed the gradient already.
    leaf = self.summed_by == "hook"

    def on_shard(part: Tensor | None) -> Tensor | None:
        # A rank without a gradient takes part in the sum, for which other ranks wait.
        own = torch.zeros(block, dtype=dtype, device=device) if part is None else part
        total = own if leaf else whole_gradient(own, cuts, grid)
        changed = hook(None if part is None else DistTensor(total, shape, cuts, grid))
        if changed is None:
            return None
        if not isinstance(changed, DistTensor) or (changed.shape, changed.grid) != (shape, grid):
            raise TypeError(
                f"register_hook: the hook returned {changed!r}; return a DistTensor of shape "
                f"{tuple(shape)} on {grid}, or None"
            )
        shard = redistribute(changed, cuts, "register_hook").shard
        return shard if leaf else shard / replicas

    handle: RemovableHandle = _block_with_gradient(self).register_hook(on_shard)
    return handle


def _in_shape(
    hook: Callable[[DistTensor | None], Tensor | None], shape: torch.Size, stored: torch.Size
) -> Callable[[DistTensor | None], Tensor | None]:
    """Return a hook that calls `hook` with a gradient of shape `stored` reshaped to `shape`."""

    def reshaped(gradient: DistTensor | None) -> Tensor | None:
        changed = hook(None if gradient is None else cast(DistTensor, gradient.reshape(shape)))
        fits = isinstance(changed, DistTensor) and changed.shape == shape
        return changed.reshape(stored) if fits else changed  # type: ignore[union-attr]

    return reshaped


def _block_with_gradient(x: DistTensor) -> Tensor:
    """Return the leaf or the shard of `x`, whose gradient is this rank's part of the gradient."""
    return x.shard if x.leaf is None else x.leaf


@implements(torch.Tensor.register_post_accumulate_grad_hook)
def register_post_accumulate_grad_hook(
    self: DistTensor, hook: Callable[[DistTensor], None]
) -> RemovableHandle:
    leaf, shape, cuts, grid = ref(self), self.shape, self.cuts, self.grid

    def on_shard(shard: Tensor) -> None:
        x = leaf()
        hook(DistTensor(shard, shape, cuts, grid) if x is None else x)

    handle: RemovableHandle = _block_with_gradient(self).register_post_accumulate_grad_hook(
        on_shard
    )
    return handle


@implements(torch.Tensor.retain_grad)
def retain_grad(self: DistTensor) -> None:
    if not self.requires_grad:
        raise RuntimeError(
            "retain_grad: the tensor does not require gradients; call requires_grad_()"
        )
    if not self.is_leaf and self.gradient_hook is None:
        self.gradient_hook = _keep(self)


def _keep(x: DistTensor) -> RemovableHandle:
    """Register a hook that adds the gradient of a non-leaf tensor to `x.retained_gradient`."""
    keeper = ref(x)

    def keep(gradient: DistTensor | None) -> None:
        x = keeper()
        if x is not None and gradient is not None:
            x.retained_gradient = (
                gradient.clone() if x.retained_gradient is None else x.retained_gradient + gradient
            )

    return register_hook(x, keep)


@implements(torch.Tensor.retains_grad.__get__)  # type: ignore[attr-defined]
def retains_grad(self: DistTensor) -> bool:
    return self.gradient_hook is not None


@implements(torch.Tensor.__deepcopy__)
def deep_copy(self: DistTensor, memo: dict[int, Any]) -> DistTensor:
    """Return a new leaf with the tensor's elements and gradient, in its layout and on its grid.

    As in torch, the copy of a Parameter has no gradient. Raises RuntimeError if the tensor is not a
    leaf. Nothing is sent, unless reading `shard` is collective.
    """
    if id(self) in memo:
        twin: DistTensor = memo[id(self)]
        return twin
    if not self.is_leaf:
        raise RuntimeError(
            "deepcopy: only leaves of the autograd graph can be copied deeply; use x.detach()"
        )
    twin = DistTensor(self.shard.detach().clone(), self.shape, self.cuts, self.grid)
    twin.requires_grad_(self.requires_grad)
    if isinstance(self, torch.nn.Parameter):
        as_parameter(twin)  # torch leaves out the gradients of Parameters
    else:
        twin.held.grad = deepcopy(self.held.grad, memo)
    memo[id(self)] = twin
    return twin
