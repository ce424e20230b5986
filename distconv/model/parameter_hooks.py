"""Hooks on the parameters of a parallelized module, which autograd calls for each gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from distconv import torch_private
from distconv.comm.collectives import all_reduce_with_grad
from distconv.device.streams import number_of_stream
from distconv.grid.process_grid import ProcessGrid
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.ownership import check_counted_once, is_summed, mark_summed
from distconv.torch_private import ShardFunction

_GONE = (
    "the parallelized module of a parameter is gone, and with it what adds up its gradient; keep "
    "the module for as long as its parameters are trained"
)


class _AfterSum:
    """A post-accumulate-gradient hook of the program, which waits for the sum over the ranks.

    It stands in its place among the hooks of the parameter, so that its handle removes it.
    """

    __slots__ = ("hook",)

    def __init__(self, hook: Callable[[Tensor], None]):
        self.hook = hook

    def __call__(self, p: Tensor) -> None:
        """Do nothing when this rank's part has been accumulated."""


class ParameterHooks:
    """Hooks that autograd calls before and after it accumulates a parameter's gradient.

    Parameters and autograd's nodes hold the hooks, unseen by Python's garbage collector. A hook
    that referred to `reduction` would keep the module alive for ever, so they hold weak references.
    As they run for every parameter in every step, they are not wrapped.

    Parameters
    ----------
    reduction: the `GradientReduction` to which every gradient is reported.
    parameters: the parameters of the module; their positions are their numbers.
    leaves: the same parameters as autograd knows them: for a sharded one, this rank's block.
    axes: for each parameter, the grid axes over which its gradient is summed.
    """

    def __init__(
        self,
        reduction: Any,
        parameters: Sequence[Tensor],
        leaves: Sequence[Tensor],
        grid: ProcessGrid,
        axes: Sequence[tuple[str, ...]],
    ):
        self._reduction = ref(reduction)
        self._parameters, self._leaves = parameters, leaves
        self._grid, self._axes = grid, axes
        self._nodes: dict[int, Node | None] = {}
        """For each parameter with hooks, the node that accumulates its gradient."""
        self._handles: list[Any] = []
        self._own: dict[int, int] = {}
        """For each parameter with hooks, the number of the post-accumulate-gradient hook here."""
        self._stream: int | None = None
        """The number of the stream on which the nodes were made."""
        self._sums: dict[int, RemovableHandle] = {}
        """For each parameter with hooks of the program, the hook before them that sums."""
        self._new = False
        """Whether autograd is making the first gradient of a parameter, not adding to one."""
        self._checked = -1
        self.share = 1.0
        """By which each rank's part of a gradient is multiplied."""

    def watch(self, trainable: Sequence[int]) -> None:
        """Put hooks on the parameters with the numbers `trainable`, unless they have hooks.

        A parameter whose autograd node torch has replaced gets them again.
        """
        stream = number_of_stream(self._grid.device)
        if stream != self._stream:
            # A node that is held here accumulates on the stream on which it was made. A capture on
            # another stream may not wait for that one: let torch make the node anew.
            self._nodes, self._stream = dict.fromkeys(self._nodes), stream
        nodes = _accumulating([self._leaves[n] for n in trainable])
        for n, node in zip(trainable, nodes, strict=True):
            p = self._leaves[n]
            if self._nodes.get(n) is not node:
                self._hook(n, p, node)
            if torch_private.hooks_of(p):
                self._sum_for_hooks(n, p)

    def remove(self) -> None:
        """Remove all hooks, and let those of the program run as torch calls them."""
        for handle in (*self._handles, *self._sums.values()):
            handle.remove()
        for p in self._leaves:
            hooks = torch_private.accumulation_hooks_of(p)
            for number, after in _waiting(p):
                hooks[number] = after.hook

    def call_with_sums(self, numbers: Iterable[int]) -> None:
        """Call the program's post-accumulate-gradient hooks of parameters whose sums are set."""
        with torch.no_grad():
            for n in numbers:
                p = self._leaves[n]
                self._let_hooks_wait(n, p)  # this rank may have had no part of the gradient
                for _, after in _waiting(p):
                    after.hook(p)

    def _hook(self, n: int, p: Tensor, node: Node) -> None:
        """Put hooks on `p`, parameter `n`, and on `node`, which accumulates its gradient.

        A parameter that has hooks gets none; torch makes a new node when its type or stream
        changes.
        """
        if n not in self._nodes:
            after = partial(self._after_accumulation, ref(self), n)
            self._handles.append(handle := p.register_post_accumulate_grad_hook(after))
            self._own[n] = handle.id
        self._nodes[n] = node
        # Hooks of the tensor would run in autograd.grad as well.
        before = partial(self._before_accumulation, ref(self), n)
        self._handles.append(node.register_prehook(before))

    def _sum_for_hooks(self, n: int, p: Tensor) -> None:
        """Let the program's own hooks on `p`, parameter `n`, get the gradient summed over ranks.

        A hook that sums comes before them, and is removed when the program has none any more.
        """
        hooks = torch_private.hooks_of(p)
        if isinstance(self._parameters[n], DistTensor) or self._grid.size == 1:
            return  # the hooks of a DistTensor sum by themselves
        if n not in self._sums:
            others = dict(hooks)
            hooks.clear()  # hooks run in the order of their registration
            self._sums[n] = p.register_hook(partial(self._sum, ref(self), n))
            hooks.update(others)
            mark_summed(p, True)
        elif len(hooks) == 1:
            mark_summed(p, False)
            self._sums.pop(n).remove()

    @staticmethod
    def _sum(reference: ref[ParameterHooks], n: int, part: Tensor | None) -> Tensor:
        self = _alive(reference)
        p = self._leaves[n]
        own = torch.zeros_like(p) if part is None else part
        counted = torch.cat([own.reshape(-1), own.new_full((1,), part is None)])
        total = all_reduce_with_grad(counted, self._grid, self._axes[n])
        if total[-1].item():
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} has a hook, and no gradient on some ranks, "
                "where the hook would not run; change the gradient when backward() has returned"
            )
        return total[:-1].view(own.shape)

    @staticmethod
    def _before_accumulation(
        reference: ref[ParameterHooks], n: int, gradients: tuple[Tensor | None]
    ) -> tuple[Tensor] | None:
        self = _alive(reference)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True): the sum of parameter gradients over the ranks cannot "
                "be differentiated; differentiate with respect to inputs, backward(inputs=[x])"
            )
        if gradients[0] is None:
            return None
        part = None if self.share == 1 else (gradients[0] * self.share,)
        if self._grid.size == 1:
            return part
        backward_pass = torch_private.backward_pass()
        if backward_pass != self._checked:
            check_counted_once()
            self._checked = backward_pass
        p = self._leaves[n]
        self._new = p.grad is None
        self._let_hooks_wait(n, p)
        first = _alive(self._reduction).expect_part(n)
        if not torch_private.hooks_of(p) or isinstance(self._parameters[n], DistTensor):
            return part
        if not is_summed(p):
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} has got a hook since the forward pass, "
                "which has seen this rank's part of the gradient; register it before"
            )
        # Results of hooks on the sum are the same on all ranks.
        return part if first else (torch.zeros_like(gradients[0]),)

    def _let_hooks_wait(self, n: int, p: Tensor) -> None:
        """Let the program's post-accumulate-gradient hooks on `p` wait for the gradient's sum."""
        hooks = torch_private.accumulation_hooks_of(p)
        if len(hooks) == 1:
            return
        if not _alive(self._reduction).enabled:
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} has a post-accumulate-gradient hook, and "
                "within no_sync its gradient is not summed over the ranks; run the backward pass "
                "outside no_sync, or register the hook after it"
            )
        for number, hook in list(hooks.items()):
            if number != self._own[n] and not isinstance(hook, _AfterSum):
                hooks[number] = _AfterSum(hook)

    @staticmethod
    def _after_accumulation(reference: ref[ParameterHooks], n: int, _: Tensor) -> None:
        self = _alive(reference)  # and with it the node with the other hook
        if self._grid.size > 1:
            _alive(self._reduction).take_part(n, self._new)


_Owner = TypeVar("_Owner")


def _alive(reference: ref[_Owner]) -> _Owner:
    """Return the object of a weak reference; raise RuntimeError if its module was deleted."""
    owner = reference()
    if owner is None:
        raise RuntimeError(_GONE)
    return owner


def _waiting(p: Tensor) -> list[tuple[int, _AfterSum]]:
    """Return the hooks of `p` that wait for the sum of its gradient, each with its number."""
    hooks = torch_private.accumulation_hooks_of(p) or {}
    return [(number, hook) for number, hook in hooks.items() if isinstance(hook, _AfterSum)]


class _Edges(ShardFunction):
    """An autograd function whose node refers to the autograd nodes of all its inputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        return inputs[0].new_empty(())


def _accumulating(parameters: list[Tensor]) -> list[Node]:
    """Return the autograd node of each parameter, which accumulates its gradient.

    One call finds all of them; torch takes several times as long to return them one by one.
    """
    if not parameters:
        return []
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return _accumulating(parameters)
    # Earlier versions of torch keep the node only as long as its result.
    result = _Edges.apply(*parameters)
    return [node for node, _ in result.grad_fn.next_functions]
