"""Gradients of a parallelized module: every rank's parts are added up during the backward pass.

The parts live in buckets and travel in them, in an order fixed from the start, each as one
non-blocking all-reduce that begins as soon as the bucket and all before it are full (Li et al.,
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import is_
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from distconv.comm import checksums
from distconv.comm.agreement import Agreement, differences, fingerprint
from distconv.comm.checksums import Checked, possible, unequal
from distconv.comm.collectives import all_reduce_with_grad
from distconv.comm.half_sums import WIDE, ErrorFeedback, HalfSum
from distconv.comm.shard_function import ShardFunction
from distconv.geometry.layout import cutting_axes, replicating_axes
from distconv.grid.interface import Grid
from distconv.grid.order import PARAMETERS
from distconv.grid.process_grid import ProcessGrid
from distconv.grid.whereabouts import user_line
from distconv.model.buckets import Bucket, fill_buckets
from distconv.model.wrappers import check_no_active_wrapper, check_unwrapped
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.eager import check_untraced, run_eagerly
from distconv.tensor.module_call import enter_call, innermost_call
from distconv.tensor.nested import shards_of, tensors_in
from distconv.tensor.ownership import OWNED, SUMMED, check_counted_once, own
from distconv.transport.interface import Request

REDUCTION_ATTRIBUTE = "_distconv_gradient_reduction"
"""The attribute by which a module, and each of its parts, keeps its `GradientReduction`."""

_POST_ACCUMULATE = (
    "a parameter has a post-accumulate-gradient hook, which would get this rank's part of the "
    "gradient; use the gradient when backward() has returned"
)

_GONE = (
    "the parallelized module of a parameter is gone, and with it what adds up its gradient; keep "
    "the module for as long as its parameters are trained"
)


def reduction_of(module: nn.Module) -> GradientReduction | None:
    """Return the `GradientReduction` of a module; None for a copy of a parallelized module."""
    reduction: GradientReduction | None = module.__dict__.get(REDUCTION_ATTRIBUTE)
    return reduction if reduction is not None and reduction.covers(module) else None


def required_reduction(caller: str, module: nn.Module) -> GradientReduction:
    """Return the `GradientReduction` of a module; raise `ValueError` where it is not parallelized.

    Parameters
    ----------
    caller: the name of whoever needs it, for the message.
    """
    reduction = reduction_of(module)
    if reduction is None:
        raise ValueError(
            f"{caller}: the module is not parallelized; call parallelize(module, grid) before"
        )
    return reduction


class GradientReduction:
    """Hooks on the parameters of one module that add up their gradients over a grid."""

    def __init__(
        self,
        module: nn.Module,
        grid: ProcessGrid,
        bucket_bytes: int,
        wire: torch.dtype | None = None,
        error_feedback: bool = False,
    ):
        self.enabled = True
        self._purpose = "gradients"
        self._held = False
        """Whether sums stay under way when a backward pass has ended."""
        self._grid = grid
        self._bucket_bytes = bucket_bytes
        self._module = ref(module)
        self._parameters = list(module.parameters())
        PARAMETERS.update({p: i for i, p in enumerate(self._parameters)})
        self._tables: list[dict[str, Any]] = []
        """Where the module and its parts keep their parameters and parts."""
        self._entries: list[Any] = []
        """The parameters and parts that were in the tables."""
        for p in self._parameters:
            if isinstance(p, DistTensor):
                p.mark_summed_when_accumulated()
        # Of a sharded parameter autograd knows this rank's block.
        self._leaves = shards_of(self._parameters)
        own((*self._parameters, *self._leaves, *module.buffers()), grid.size)
        self._axes = [axes_of_sum(p, grid) for p in self._parameters]
        """For each parameter, the grid axes over which its gradient is summed."""
        self._wire, self._error_feedback = wire, error_feedback
        self._buckets: list[Bucket] = []
        self._members: list[list[int]] = []
        """For each bucket the parameters in it, by their numbers."""
        self._bucket_of: dict[int, int] = {}
        """For each parameter's number its bucket."""
        self._laid_out: list[Any] = []
        self._nodes: dict[int, Node | None] = {}
        """For each parameter that is watched, the node that accumulates its gradient."""
        self._handles: list[Any] = []
        """The handles of all hooks on parameters and their nodes."""
        self._stream: int | None = None
        """The number of the stream on which the nodes were made."""
        self._sums: dict[int, RemovableHandle] = {}
        """For each parameter with hooks of the program, the one before them that adds up."""
        self._is_part = [False] * len(self._leaves)
        """For each parameter whether .grad is this rank's part of a sum, not equal on all ranks."""
        self._missing: list[int] = []
        """For each bucket, how many gradients the present backward pass still has to make."""
        self._new = False
        """Whether autograd is making the first gradient of a parameter, not adding to one."""
        self._made: set[int] = set()
        """The parameters whose gradient the present backward pass has made."""
        self._pass = self._checked = -1
        self._started = 0
        self._warned = False
        """Whether the program has been told that ranks train different parameters."""
        self._agreement = Agreement(grid)
        self._calls = 0
        self._layout = 0
        """The fingerprint of what decides how buckets are laid out."""
        self._make_communicators()
        self._prepare()
        module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        module.register_forward_hook(self._after_forward, always_call=True)

    @property
    def grid(self) -> ProcessGrid:
        """Return the grid over which gradients are added up."""
        return self._grid

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReduction:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a parallelized module belongs to its MPI job; save its state_dict()")

    def covers(self, module: nn.Module) -> bool:
        """Return whether `module` is the one that this reduction was made for, or a part of it."""
        whole = self._module()
        return whole is not None and any(part is module for part in whole.modules())

    def whole(self) -> nn.Module | None:
        """Return the module that this reduction was made for; None where it is gone."""
        return self._module()

    def release(self) -> None:
        """Leave the parameters, with gradients that are sums, to the program."""
        self.settle()
        self._check_sums("the parameters leave their module", [True] * len(self._leaves))
        for handle in (*self._handles, *self._sums.values()):
            handle.remove()
        for x in (*self._parameters, *self._leaves):
            x.__dict__.pop(OWNED, None)
            x.__dict__.pop(SUMMED, None)
            PARAMETERS.pop(x, None)

    def reduce(self) -> None:
        """Add up the parts that backward passes in `no_sync` have left; all ranks call it together.

        Sums of earlier passes stay as they are.
        """
        if self._grid.size == 1:
            return
        self._settle()
        self._started = 0
        self._made.clear()
        self._finish()

    def give(self, sums: Iterable[Tensor | None]) -> None:
        """Set the gradient of each parameter to a sum over the ranks, which another has taken."""
        for p, gradient in zip(self._leaves, sums, strict=True):
            p.grad = gradient
        self._is_part = [False] * len(self._leaves)

    def travel_apart(self, number: int) -> None:
        """Reduce from now on by communicators that reductions of other numbers do not use.

        All ranks of the grid call it together, between steps.
        """
        self._purpose = f"gradients {number}"
        self._make_communicators()
        self._connect()
        self._laid_out = []
        self._prepare()

    def hold(self) -> None:
        """Leave sums under way when a backward pass has ended, until `start_held` and `settle`."""
        self.settle()
        self._held, self._started = True, 0

    def start_held(self) -> None:
        """Start the sums that backward passes since `hold` have not started."""
        self._held = False
        if self._grid.size > 1:
            while self._started < len(self._buckets):
                self._start_next()

    def settle(self) -> None:
        """Wait for all sums that have been started, and give them to the parameters."""
        self._settle()
        self._pass = -1

    def _make_communicators(self) -> None:
        for axes in dict.fromkeys(self._axes):
            # All ranks make it together, whatever each of them trains first.
            self._grid.communicator(axes, self._purpose)

    def _connect(self) -> None:
        """Send something over each communicator; all ranks of the grid call it together.

        A carrier may connect the ranks at first use, where those of one communicator wait for each
        other: ranks that come to another one first would wait for ever.
        """
        for axes in dict.fromkeys(self._axes):
            comm = self._grid.communicator(axes, self._purpose)
            self._grid.transport.all_reduce(torch.zeros(1, device=self._grid.device), comm).wait()

    @property
    def _starts_at_the_end(self) -> bool:
        """Return whether sums start in one order on all ranks, when the backward pass has ended.

        A parameter may have no gradient on some ranks. Those start its bucket at the end, and so
        do all: among the exchanges of the backward pass it would have another place there.
        """
        return self._grid.transport.ordered or self._wire is not None

    def _prepare(self) -> None:
        """Hook the trainable parameters and lay out the buckets, last parameters first."""
        stream = _number_of_stream(self._grid.device)
        if stream != self._stream:
            # A node accumulates on the stream on which it was made, for as long as it is held here.
            # A capture on another stream may not wait for that one: let torch make the node anew.
            self._nodes, self._stream = dict.fromkeys(self._nodes), stream
        trainable = [(n, p) for n, p in enumerate(self._leaves) if p.requires_grad]
        layout = []
        nodes = _accumulating([p for _, p in trainable])
        for (n, p), node in zip(trainable, nodes, strict=True):
            if self._nodes.get(n) is not node:
                self._hook(n, p, node)
            if p._backward_hooks:
                self._sum_for_hooks(n, p)
            hooks: Any = p._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            if len(hooks) > 1:
                raise RuntimeError(_POST_ACCUMULATE)
            layout.append((n, p.dtype, p.shape, p.stride()))
        if layout == self._laid_out:
            return
        self._check_sums("parameters were frozen", [not p.requires_grad for p in self._leaves])
        self._laid_out = layout
        self._layout = fingerprint([self._kind(p) for p in self._parameters])
        self._buckets = self._filled()
        number_of = {id(p): n for n, p in trainable}
        self._members = [[number_of[id(p)] for p in b.parameters] for b in self._buckets]
        self._bucket_of = {n: b for b, members in enumerate(self._members) for n in members}

    def _check_sums(self, event: str, concerned: Iterable[bool]) -> None:
        """Raise where the gradient of a parameter concerned is still a part of a sum."""
        if any(
            x and part and p.grad is not None
            for p, part, x in zip(self._leaves, self._is_part, concerned, strict=True)
        ):
            raise RuntimeError(
                f"{event} while their gradients are still parts, after no_sync; run a backward "
                "pass outside no_sync first, or zero the gradients before"
            )

    def _kind(self, p: Tensor) -> str:
        """Return all that decides where a parameter's gradient lies in the buckets, if at all."""
        stride = "" if isinstance(p, DistTensor) else f" of strides {p.stride()}"
        return f"{p.dtype}{stride}, requires_grad={p.requires_grad}"

    def _filled(self) -> list[Bucket]:
        """Return the buckets in the order in which backward passes are to fill them."""
        trained = [
            (p, axes) for p, axes in zip(self._leaves, self._axes, strict=True) if p.requires_grad
        ]
        return [
            Bucket(
                parameters,
                self._grid.communicator(axes, self._purpose),
                self._sum_over(axes, parameters),
            )
            for axes, parameters in fill_buckets(trained, self._bucket_bytes)
        ]

    def _sum_over(
        self, axes: tuple[str, ...], parameters: Sequence[Tensor]
    ) -> Callable[[Tensor], Request] | None:
        """Return what starts to add up a bucket; None for the carrier's all-reduce."""
        grid, wire = self._grid, self._wire
        if wire is None or parameters[0].dtype not in WIDE or grid.topology.parts(axes) == 1:
            return None
        # The counts behind the gradients have no remainder.
        feedback = ErrorFeedback(len(parameters)) if self._error_feedback else None
        return partial(
            HalfSum, grid=grid, axes=axes, wire=wire, purpose=self._purpose, feedback=feedback
        )

    def _hook(self, n: int, p: Tensor, node: Node) -> None:
        """Watch a parameter; again where a change of type or stream gives it another node."""
        if n not in self._nodes:
            after = partial(self._after_accumulation, ref(self), n)
            self._handles.append(p.register_post_accumulate_grad_hook(after))
        self._nodes[n] = node
        # Hooks of the tensor would run in autograd.grad as well.
        before = partial(self._before_accumulation, ref(self), n)
        self._handles.append(node.register_prehook(before))

    def _sum_for_hooks(self, n: int, p: Tensor) -> None:
        """Let hooks of the program get the sum of a parameter's gradient, not this rank's part."""
        hooks: Any = p._backward_hooks
        if isinstance(self._parameters[n], DistTensor) or self._grid.size == 1:
            return  # the hooks of a DistTensor add up by themselves
        if n not in self._sums:
            others = dict(hooks)
            hooks.clear()  # hooks run in the order in which they have come
            self._sums[n] = p.register_hook(partial(self._sum, ref(self), n))
            hooks.update(others)
            p.__dict__[SUMMED] = True
        elif len(hooks) == 1:
            del p.__dict__[SUMMED]
            self._sums.pop(n).remove()

    @run_eagerly
    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = tensors_in(*args, kwargs)
        grids = [x.grid for x in inputs if isinstance(x, DistTensor)]
        if module is not self._module():
            if grids and torch.is_grad_enabled() and reduction_of(module) is None:
                raise RuntimeError(
                    "a copy of a parallelized module is not parallelized: its gradients would stay "
                    "parts; call parallelize(copy, grid), or run it under torch.no_grad()"
                )
            return
        outermost = enter_call(self, depth=2).outermost
        if not torch.is_grad_enabled():
            if outermost and self._together(inputs):
                self._check_equal(module)
            return
        check_untraced("a parallelized module", inputs)
        check_no_active_wrapper()
        self._check_structure(module)
        self._prepare()
        if inputs and not grids and self._buckets:
            raise TypeError(
                "a parallelized module was called on plain tensors only, of which every rank would "
                "count the gradient once; pass distconv.distribute_tensor(x, grid), or call it "
                "under torch.no_grad()"
            )
        for grid in grids:
            if grid is not self._grid and grid != self._grid:
                raise ValueError(
                    f"the module is parallelized on {self._grid}, its input lives on {grid}; "
                    "use one grid for both"
                )
        if outermost:
            self._check_equal(module)
            self._agreement.ask(self._layout ^ self.enabled, module.training)

    def _together(self, inputs: Iterable[Tensor]) -> bool:
        """Return whether all ranks of the grid make this call, as they do with cut tensors.

        One rank may call the module alone with what it has in full.
        """
        distributed = (x for x in inputs if isinstance(x, DistTensor))
        return any(any(x.cuts) and x.grid == self._grid for x in distributed)

    def _check_structure(self, module: nn.Module) -> None:
        entries = [x for table in self._tables for x in table.values()]
        if entries and all(map(is_, entries, self._entries)) and len(entries) == len(self._entries):
            return
        check_unwrapped(module)
        if [id(p) for p in module.parameters()] != [id(p) for p in self._parameters]:
            raise RuntimeError(
                "the module has got other parameters since it was parallelized, or for this call "
                "alone (torch.func.functional_call), whose gradients nobody adds up; call "
                "parallelize(distconv.unparallelize(model), grid) after the last change of its "
                "structure"
            )
        # To go through all parts takes torch long.
        self._tables = [t for m in module.modules() for t in (m._parameters, m._modules)]
        self._entries = [x for table in self._tables for x in table.values()]

    @run_eagerly
    def _after_forward(self, module: nn.Module, _: Any, result: Any) -> None:
        if module is not self._module():
            return
        call = innermost_call()
        if call is None or call.of is not self or call.failed:
            # After an error torch calls this hook, too, maybe before the other one.
            return
        call.leave()
        if call.outermost:
            self._check_agreement(module)
        results = tensors_in(result)
        for x in results:
            if isinstance(x, DistTensor):
                # What is handed out has its block: who looks at it alone waits for nobody.
                for node in {x.shard.grad_fn, x.held.grad_fn}:
                    if node is not None:
                        # A backward pass may come when the program has dropped the module.
                        notes: Any = node.metadata
                        notes[REDUCTION_ATTRIBUTE] = self
            elif x.requires_grad:
                raise TypeError(
                    "a parallelized module has returned a plain tensor that requires gradients; "
                    "every rank would count them once. Keep it distributed within the module, and "
                    "take full_tensor() of what it returns"
                )

    def _check_equal(self, module: nn.Module) -> None:
        """Raise on every rank where parameters or buffers differ between ranks, in some calls."""
        self._calls += 1
        # Often in the beginning, where most goes wrong: in calls number 2, 4, 8, and so on.
        rare = self._calls % 128 and (self._calls == 1 or self._calls & (self._calls - 1))
        if (rare and not checksums.ALWAYS) or not possible(self._grid):
            return
        found = unequal(checked_state(module), self._grid)
        if found:
            raise RuntimeError(
                f"{found[0]} of the parallelized module is not the same on all ranks: {found[1]}. "
                "Every rank has to take the same optimizer steps, with the same learning rate, and "
                "skip the same ones; load_state_dict with the same state mends it"
            )

    def _check_agreement(self, module: nn.Module) -> None:
        """Raise where the ranks have not begun the forward pass alike."""
        alike, in_mode = self._agreement.answer() or (True, True)
        if not in_mode:
            # The other ranks may wait within the forward pass, and hear no more than this.
            raise RuntimeError(
                f"the parallelized module is in {'training' if module.training else 'evaluation'} "
                f"mode on rank {self._grid.rank}, and not on all others; call train() or eval() on "
                "every rank"
            )
        if alike:
            return
        names = (name for name, _ in module.named_parameters())
        kinds = dict(zip(names, map(self._kind, self._parameters), strict=True))
        kinds["no_sync"] = "off" if self.enabled else "on"
        found = differences(self._agreement.everyone(kinds))
        more = f"; and {len(found) - 8} more" if len(found) > 8 else ""
        raise RuntimeError(
            "the ranks do not call the parallelized module alike, and would add up gradients of "
            f"different parameters: {'; '.join(found[:8])}{more}. Freeze and unfreeze parameters, "
            "and enter no_sync, in the same way on every rank"
        )

    # Python's garbage collector does not see what parameters and the nodes of autograd hold: a
    # reference from there to what holds the parameters would keep all of them for ever. So the
    # hooks hold a weak one. They run for every parameter in every step: nothing wraps them.

    @staticmethod
    def _sum(reference: ref[GradientReduction], n: int, part: Tensor | None) -> Tensor:
        self = reference()
        if self is None:
            raise RuntimeError(_GONE)
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
        reference: ref[GradientReduction], n: int, gradients: tuple[Tensor | None]
    ) -> tuple[Tensor] | None:
        self = reference()
        if self is None:
            raise RuntimeError(_GONE)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True): the sum of parameter gradients over the ranks cannot "
                "be differentiated; differentiate with respect to inputs, backward(inputs=[x])"
            )
        if gradients[0] is None or self._grid.size == 1:
            return None
        backward_pass = torch._C._current_graph_task_id()
        if backward_pass != self._checked:
            check_counted_once()
            self._checked = backward_pass
        p = self._leaves[n]
        gradient = p.grad
        self._new = gradient is None
        if gradient is not None and not self._is_part[n] and self._rank_in_sum(n):
            # A sum of an earlier backward pass becomes a part again, all of it on one rank.
            gradient.zero_()
        self._is_part[n] = True
        if len(p._post_accumulate_grad_hooks) > 1:  # type: ignore[attr-defined]
            raise RuntimeError(_POST_ACCUMULATE)
        if not p._backward_hooks or isinstance(self._parameters[n], DistTensor):
            return None
        if SUMMED not in p.__dict__:
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} has got a hook since the forward pass, "
                "which has seen this rank's part of the gradient; register it before"
            )
        # So does what hooks have made of the sum.
        return (torch.zeros_like(gradients[0]),) if self._rank_in_sum(n) else None

    def _rank_in_sum(self, n: int) -> int:
        """Return this rank's number among those that add up the gradient of a parameter."""
        rank: int = self._buckets[self._bucket_of[n]].comm.rank
        return rank

    @staticmethod
    def _after_accumulation(reference: ref[GradientReduction], n: int, _: Tensor) -> None:
        self = reference()
        if self is None:
            raise RuntimeError(_GONE)  # and with it the node with the other hook
        if self._grid.size == 1:
            return
        backward_pass = torch._C._current_graph_task_id()
        if backward_pass != self._pass:
            self._begin(backward_pass)
        if self._new:
            self._made.add(n)
        if not self.enabled:
            return
        b = self._bucket_of[n]
        self._missing[b] -= 1
        if self._missing[b] or self._starts_at_the_end:
            return
        while self._started < len(self._buckets) and not self._missing[self._started]:
            self._start_next()

    def _begin(self, backward_pass: int) -> None:
        if self._held and any(bucket.under_way for bucket in self._buckets):
            raise RuntimeError(
                "a second backward pass through a model within ConcurrentReductions, whose sums of "
                "the first are under way; leave the context between them, or run the first in "
                "no_sync"
            )
        self._settle()
        self._pass, self._started = backward_pass, 0
        self._made.clear()
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        if self.enabled:
            end = _EndOfBackward(self._finish, self._settle_failed)
            Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]

    def _start_next(self) -> None:
        members = self._members[self._started]
        self._buckets[self._started].start(
            [self._is_part[n] for n in members], [n in self._made for n in members], self._grid
        )
        self._started += 1

    def _finish(self) -> None:
        """Start the reductions left at the end of backward, and give parameters their sums."""
        if self._held and self._starts_at_the_end:
            return  # other reductions start in another order on other ranks
        while self._started < len(self._buckets):
            self._start_next()
        if not self._held:
            self.settle()

    def _settle_failed(self) -> None:
        if not self._held:
            self._settle()

    def _settle(self) -> None:
        """Wait for the reductions under way: a gradient they have summed is no part any more."""
        for bucket, members in zip(self._buckets, self._members, strict=True):
            if bucket.finish():
                for n in members:
                    self._is_part[n] = False
                if bucket.uneven and not self._warned:
                    self._warn(bucket, members)

    def _warn(self, bucket: Bucket, members: list[int]) -> None:
        """Tell the program of a parameter that some ranks have used and others have not.

        One of the ranks that add up the gradient says so; on GPUs those that have none, as others
        do not look.
        """
        ranks, kind = bucket.comm.size, self._wire or bucket.parameters[0].dtype
        # Counts travel with the gradients, and larger ones are rounded as these are.
        exact = ranks <= 2 / torch.finfo(kind).eps
        if not exact or (bucket.comm.rank and not self._grid.computes_on_gpu):
            return
        self._warned = True
        i, some = next(iter(bucket.uneven.items()))
        module = self._module()
        names = [] if module is None else [name for name, _ in module.named_parameters()]
        name = names[members[i]] if members[i] < len(names) else "a parameter"
        warnings.warn(
            f"backward at {user_line()}: {name} of the parallelized module has got a gradient on "
            f"{some} of {ranks} ranks only. If ranks have chosen different layers, by their rank "
            "or by data that they do not share, the numbers are wrong. It is right only where they "
            "choose for blocks of their own, between to_local() and DistTensor.from_local. There "
            "will be no more such warnings for this module",
            stacklevel=2,
        )


class _EndOfBackward:
    """Ends a backward pass: autograd calls it, or drops it where the pass has failed."""

    __slots__ = ("_failed", "_finish")

    def __init__(self, finish: Callable[[], None], failed: Callable[[], None]):
        self._finish = finish
        self._failed: Callable[[], None] | None = failed

    def __call__(self) -> None:
        self._finish()
        self._failed = None

    def __del__(self) -> None:
        if self._failed is not None:
            self._failed()


def _number_of_stream(device: torch.device) -> int | None:
    """Return the number of a GPU's current stream; streams themselves are never unequal by `!=`."""
    return torch.cuda.current_stream(device).stream_id if device.type == "cuda" else None


def axes_of_sum(p: Tensor, grid: Grid) -> tuple[str, ...]:
    """Return the axes along which ranks hold the same block of a parameter, and parts of its
    gradient.
    """
    return replicating_axes(p.cuts if isinstance(p, DistTensor) else (), grid.topology)


def checked(name: str, tensor: Tensor) -> Checked:
    """Return a parameter or buffer, for comparison among the ranks that hold the same block."""
    if isinstance(tensor, DistTensor):
        return Checked(name, tensor.shard, cutting_axes(tensor.cuts))
    return Checked(name, tensor)


def checked_state(module: nn.Module) -> Iterator[Checked]:
    """Yield the parameters and buffers of a module, for comparison as by `checked`."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield checked(name, tensor)


class _Edges(ShardFunction):
    """An autograd function that leads to all its inputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        return inputs[0].new_empty(())


def _accumulating(parameters: list[Tensor]) -> list[Node]:
    """Return the nodes that accumulate gradients.

    They are found in one call, as torch takes several times as long to give them one by one.
    """
    if not parameters:
        return []
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return _accumulating(parameters)
    # Earlier versions of torch keep the node no longer than its result.
    result = _Edges.apply(*parameters)
    return [node for node, _ in result.grad_fn.next_functions]
