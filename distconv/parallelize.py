"""A whole model on a grid: equal parameters everywhere, and gradients added up during backward.

Every rank holds all parameters, and computes its part of their gradients; the gradient is the sum
of the parts. The parts live in buckets and travel in them, in an order fixed from the start, each
as one non-blocking all-reduce that begins as soon as the bucket and all before it are full (Li et
al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Token
from operator import is_
from typing import Any, NoReturn, TypeVar
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.autograd import Function, Variable
from torch.autograd.graph import Node
from torch.nn.parameter import is_lazy

from distconv.buckets import Bucket
from distconv.exchange import broadcast
from distconv.grid import ProcessGrid
from distconv.layout import Layout, replicating_axes
from distconv.layouts import layouts_of, take_inputs
from distconv.sharding import shard
from distconv.tensor import IN_MODULE, DistTensor, shards_of, tensors_in

Module = TypeVar("Module", bound=nn.Module)

_ATTRIBUTE = "_distconv_gradient_reduction"
_WITHOUT_SHAPE = "without shape yet"


def parallelize(
    module: Module,
    grid: ProcessGrid,
    *,
    layouts: Mapping[str, Layout] | None = None,
    shard_parameters: bool = False,
    bucket_bytes: int = 2**20,
) -> Module:
    """Make `module` compute on DistTensors of `grid` what it computes serially; returns it.

    Parameters and buffers become those of rank 0, on the grid's device. From then on, when
    `backward()` returns, the gradients of the parameters are, on every rank, those of the serial
    program. Parameters that take no part in a backward pass keep their gradient, or None. Hooks on
    parameters see this rank's part, before the sum. The state_dict stays that of the plain module.
    All ranks of the grid call it together, and run the same forward and backward passes.

    Parameters
    ----------
    module: any torch.nn.Module; its inputs are then DistTensors.
    layouts: for patterns of module names, as "block5.*" ("" is the module itself), the layout in
        which the modules take their inputs; the last pattern that matches counts. Where a tensor
        has another layout it is redistributed, once for all that take it in the same one. Other
        modules take their inputs as they come.
    shard_parameters: whether every rank keeps only its blocks of the weights of convolutions and
        fully connected layers whose layout cuts channels. They become DistTensors; optimizers that
        have no state yet may have been made before. Weights that are parametrized stay whole.
    bucket_bytes: how much of the gradient travels in one message.

    Raises
    ------
    ValueError
        On every rank, when the ranks' modules differ in the names, shapes, types or strides of
        their parameters and buffers, some of these have no shape yet, the module is parallelized
        already, or a pattern matches nothing.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"parallelize: {type(module).__name__} is not a torch.nn.Module")
    if any(_reduction_of(m) for m in module.modules()) or any(
        _ATTRIBUTE in p.__dict__ for p in shards_of(module.parameters())
    ):
        raise ValueError(
            "parallelize: the module, or a part of it, is parallelized already; do it once, for "
            "all modules that share parameters together"
        )
    if any(isinstance(p, DistTensor) for p in module.parameters()):
        raise ValueError(
            "parallelize: parameters of the module are sharded already; build it anew and load "
            "distconv.full_state_dict of this one"
        )
    options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "shard_parameters": shard_parameters}
    options |= {"grid": str(grid), "layouts": layouts}
    _compare(options, grid, "pass the same on every rank")
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(f"parallelize: bucket_bytes={bucket_bytes!r} is no size; expected from 1")
    chosen = layouts_of(module, layouts or {})
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    _compare_modules(state, grid)
    if any(tensor.device != grid.device for tensor in state.values()):
        module.to(grid.device)
    for tensor in (*module.parameters(), *module.buffers()):
        broadcast(tensor, grid)
    if shard_parameters:
        shard(module, chosen, grid)
    take_inputs(module, chosen)
    reduction = _GradientReduction(module, grid, bucket_bytes)
    for part in module.modules():
        part.__dict__[_ATTRIBUTE] = reduction
    return module


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Within it, backward passes leave every rank its own part of the gradients.

    The next backward pass outside adds all parts up: accumulation over several mini-batches for the
    price of one reduction. Until then a gradient that the program sets is a part, too. All ranks
    enter it together; `module` has been parallelized.
    """
    reduction = _reduction_of(module)
    if reduction is None:
        raise ValueError("no_sync: the module is not parallelized; call parallelize(module, grid)")
    before, reduction.enabled = reduction.enabled, False
    try:
        yield
    finally:
        reduction.enabled = before


def _reduction_of(module: nn.Module) -> _GradientReduction | None:
    """What adds up the gradients of `module`; None for a copy of a parallelized module."""
    reduction: _GradientReduction | None = module.__dict__.get(_ATTRIBUTE)
    return reduction if reduction is not None and reduction.covers(module) else None


def _compare(mine: dict[str, Any], grid: ProcessGrid, way_out: str) -> list[dict[str, Any]]:
    """What every rank has; raises on all of them where that differs."""
    everyone: list[dict[str, Any]] = grid.all_gather_object(mine)
    for rank, theirs in enumerate(everyone):
        for name in sorted(everyone[0].keys() | theirs.keys()):
            first, other = everyone[0].get(name, "nothing"), theirs.get(name, "nothing")
            if first != other:
                raise ValueError(
                    f"parallelize: {name} is {other} on rank {rank} and {first} on rank 0; "
                    f"{way_out}"
                )
    return everyone


def _compare_modules(state: dict[str, Tensor], grid: ProcessGrid) -> None:
    mine = {
        n: _WITHOUT_SHAPE
        if is_lazy(t)
        else (tuple(t.shape), str(t.dtype), t.requires_grad, t.stride())
        for n, t in state.items()
    }
    everyone = _compare(mine, grid, "build the same module on every rank")
    for rank, theirs in enumerate(everyone):
        if list(theirs) != list(everyone[0]):
            raise ValueError(
                f"parallelize: parameters and buffers come in the order {list(theirs)} on rank "
                f"{rank} and {list(everyone[0])} on rank 0; build the same module on every rank"
            )
    lazy = [name for name, what in mine.items() if what == _WITHOUT_SHAPE]
    if lazy:
        raise ValueError(
            f"parallelize: without shape yet: {', '.join(lazy)}; call the module once on a small "
            "plain tensor before"
        )


class _GradientReduction:
    """Hooks on the parameters of one module that add up their gradients over a grid."""

    def __init__(self, module: nn.Module, grid: ProcessGrid, bucket_bytes: int):
        self.enabled = True
        self._grid = grid
        self._bucket_bytes = bucket_bytes
        self._module = ref(module)
        self._parameters = list(module.parameters())
        self._tables: list[dict[str, Any]] = []
        """Where the module and its parts keep their parameters and parts."""
        self._entries: list[Any] = []
        """What is in the tables."""
        for p in self._parameters:
            if isinstance(p, DistTensor):
                p.gradients_are_summed()
        # Of a sharded parameter autograd knows this rank's block.
        self._leaves = shards_of(self._parameters)
        self._axes = [_replicated_over(p, grid) for p in self._parameters]
        """For each parameter, along which its gradient is summed."""
        self._buckets: list[Bucket] = []
        self._place_of: dict[Tensor, tuple[int, int]] = {}
        """For each parameter its bucket, and its number there."""
        self._laid_out: list[Any] = []
        self._hooked: dict[Tensor, Node | None] = {}
        """For each parameter that is watched, the node that accumulates its gradient."""
        self._stream: Any = None
        """That on which the nodes were made."""
        self._parts: set[Tensor] = set()
        """Parameters whose .grad holds this rank's part of a sum; others have the same on all."""
        self._missing: list[int] = []
        """For each bucket, how many gradients the present backward pass still has to make."""
        self._new = False
        """Whether autograd is making the first gradient of a parameter, not adding to one."""
        self._pass = -1
        self._started = 0
        self._scopes: list[Token[object]] = []
        self._prepare()
        module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        module.register_forward_hook(self._after_forward, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GradientReduction:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a parallelized module belongs to its MPI job; save its state_dict()")

    def covers(self, module: nn.Module) -> bool:
        """Whether `module` is the one it was made for, or a part of that."""
        whole = self._module()
        return whole is not None and any(part is module for part in whole.modules())

    def _prepare(self) -> None:
        """Hook the trainable parameters and lay out the buckets, last parameters first."""
        stream = _current_stream(self._grid.device)
        if stream != self._stream:
            # A node accumulates on the stream on which it was made, for as long as it is held here.
            # What is captured on another stream may not wait for that one: let torch make it anew.
            self._hooked, self._stream = dict.fromkeys(self._hooked), stream
        trainable = [p for p in self._leaves if p.requires_grad]
        for p, node in zip(trainable, _accumulating(trainable), strict=True):
            self._hook(p, node)
            hooks: Any = p._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            if len(hooks) > 1:
                raise RuntimeError(
                    "a parameter has a post-accumulate-gradient hook, which would get this rank's "
                    "part of the gradient; use the gradient when backward() has returned"
                )
        layout = [(id(p), p.dtype, p.shape, p.stride()) for p in trainable]
        if layout == self._laid_out:
            return
        if any(p.grad is not None and not p.requires_grad for p in self._parts):
            raise RuntimeError(
                "parameters were frozen while their gradients are still parts, after no_sync; "
                "run a backward pass outside no_sync first, or zero the gradients before"
            )
        self._laid_out = layout
        self._buckets = self._filled()
        self._place_of = {
            p: (b, i)
            for b, bucket in enumerate(self._buckets)
            for i, p in enumerate(bucket.parameters)
        }

    def _filled(self) -> list[Bucket]:
        """Buckets in the order in which backward passes are to fill them."""
        buckets = []
        filling: dict[tuple[tuple[str, ...], torch.dtype], list[Tensor]] = {}

        def close(axes: tuple[str, ...], dtype: torch.dtype) -> None:
            comm = self._grid.communicator(axes, "gradients")
            buckets.append(Bucket(filling.pop((axes, dtype)), comm))

        for p, axes in reversed(list(zip(self._leaves, self._axes, strict=True))):
            if p.requires_grad:
                chosen = filling.setdefault((axes, p.dtype), [])
                chosen.append(p)
                if sum(q.numel() * q.element_size() for q in chosen) >= self._bucket_bytes:
                    close(axes, p.dtype)
        for kind in list(filling):
            close(*kind)
        return buckets

    def _hook(self, p: Tensor, node: Node) -> None:
        """Watch a parameter; again where a change of its type, or stream, gives it another node."""
        if self._hooked.get(p) is node:
            return
        if p not in self._hooked:
            p.register_post_accumulate_grad_hook(self._after_accumulation)
            p.__dict__[_ATTRIBUTE] = True
        self._hooked[p] = node
        # Hooks of the tensor would run in autograd.grad as well.
        node.register_prehook(lambda grads, p=p: self._before_accumulation(p, *grads))

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = tensors_in(args, kwargs)
        grids = [x.grid for x in inputs if isinstance(x, DistTensor)]
        if module is not self._module():
            if grids and torch.is_grad_enabled() and _reduction_of(module) is None:
                raise RuntimeError(
                    "a copy of a parallelized module is not parallelized: its gradients would stay "
                    "parts; call parallelize(copy, grid), or run it under torch.no_grad()"
                )
            return
        self._scopes.append(IN_MODULE.set(IN_MODULE.get() or object()))
        if not torch.is_grad_enabled():
            return
        self._check_structure(module)
        self._prepare()
        if inputs and not grids and self._buckets:
            raise TypeError(
                "a parallelized module was called on plain tensors only, of which every rank would "
                "count the gradient once; pass distconv.distribute_tensor(x, grid), or call it "
                "under torch.no_grad()"
            )
        for grid in grids:
            if grid != self._grid:
                raise ValueError(
                    f"the module is parallelized on {self._grid}, its input lives on {grid}; "
                    "use one grid for both"
                )

    def _check_structure(self, module: nn.Module) -> None:
        entries = [x for table in self._tables for x in table.values()]
        if entries and all(map(is_, entries, self._entries)) and len(entries) == len(self._entries):
            return
        if [id(p) for p in module.parameters()] != [id(p) for p in self._parameters]:
            raise RuntimeError(
                "the module has got other parameters since it was parallelized, whose gradients "
                "nobody adds up; call parallelize after the last change of its structure"
            )
        # To go through all parts takes torch long.
        self._tables = [t for m in module.modules() for t in (m._parameters, m._modules)]
        self._entries = [x for table in self._tables for x in table.values()]

    def _after_forward(self, module: nn.Module, _: Any, result: Any) -> None:
        if module is not self._module():
            return
        IN_MODULE.reset(self._scopes.pop())
        plain = (x for x in tensors_in(result) if not isinstance(x, DistTensor))
        if any(x.requires_grad for x in plain):
            raise TypeError(
                "a parallelized module has returned a plain tensor that requires gradients; every "
                "rank would count them once. Keep it distributed within the module, and take "
                "full_tensor() of what it returns"
            )

    def _before_accumulation(self, p: Tensor, gradient: Tensor | None) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True): the sum of parameter gradients over the ranks cannot "
                "be differentiated; differentiate with respect to inputs, backward(inputs=[x])"
            )
        if gradient is None or self._grid.size == 1:
            return
        self._new = p.grad is None
        if p.grad is not None and p not in self._parts:
            # What an earlier backward pass has summed becomes parts again, all of it on one rank.
            bucket = self._buckets[self._place_of[p][0]]
            if bucket.comm.rank:
                p.grad.zero_()
        self._parts.add(p)

    def _after_accumulation(self, p: Tensor) -> None:
        if self._grid.size == 1:
            return
        backward_pass = torch._C._current_graph_task_id()
        if backward_pass != self._pass:
            self._begin(backward_pass)
        b, i = self._place_of[p]
        bucket = self._buckets[b]
        bucket.prepare(backward_pass)
        if self._new:
            bucket.move_in(i)
        if not self.enabled:
            return
        self._missing[b] -= 1
        while self._started < len(self._buckets) and not self._missing[self._started]:
            self._start_next()

    def _begin(self, backward_pass: int) -> None:
        self._settle()
        self._pass, self._started = backward_pass, 0
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        if self.enabled:

            def finish() -> None:
                self._finish()

            # A pass that fails leaves reductions under way; autograd drops what it would call.
            finalize(finish, self._settle).atexit = False
            Variable._execution_engine.queue_callback(finish)  # type: ignore[attr-defined]

    def _start_next(self) -> None:
        bucket = self._buckets[self._started]
        bucket.prepare(self._pass)
        bucket.start(self._parts, self._grid)
        self._started += 1

    def _finish(self) -> None:
        """At the end of backward: start what is left, and give every parameter its sum."""
        while self._started < len(self._buckets):
            self._start_next()
        self._settle()
        self._pass = -1

    def _settle(self) -> None:
        """Wait for the reductions under way: what they have added up is no part any more."""
        for bucket in self._buckets:
            if bucket.finish():
                self._parts.difference_update(bucket.parameters)


def _current_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _replicated_over(p: Tensor, grid: ProcessGrid) -> tuple[str, ...]:
    """The axes along which ranks hold the same block of a parameter."""
    return replicating_axes(p.cuts if isinstance(p, DistTensor) else (), grid.topology)


class _Edges(Function):
    """Leads to all its inputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        return inputs[0].new_empty(())


def _accumulating(parameters: list[Tensor]) -> list[Node]:
    """The nodes that accumulate gradients; one by one torch takes several times as long."""
    if not parameters:
        return []
    with torch.enable_grad():
        # Earlier versions of torch keep the node no longer than its result.
        result = _Edges.apply(*parameters)
    return [node for node, _ in result.grad_fn.next_functions]
