"""The registry of rules, which implement torch functions for DistTensors.

A function without a rule raises `UnsupportedOperation`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, NoReturn, Protocol, TypeVar
from weakref import ref

import torch
from torch import Tensor

from distconv import torch_private
from distconv.tensor.base import DistTensorBase
from distconv.torch_private import count_modes

Rule = TypeVar("Rule", bound=Callable[..., Any])


RULES: dict[Callable[..., Any], Callable[..., Any]] = {}
"""The rule of each torch function on DistTensors: a function of the same arguments."""


def implements(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Register the decorated rule as the implementation of torch functions for DistTensors.

    The rule is called on every rank of the grid with the arguments of the torch function. At least
    one argument is or contains a DistTensor. The rule decides from global metadata alone whether it
    supports the arguments; if not, it raises `UnsupportedOperation` before any message.

    Examples
    --------
    >>> from distconv import exchange, layout
    >>> @dc.implements(torch.sum)
    ... def sum_of_all(input):
    ...     axes = layout.cutting_axes(input.cuts)
    ...     total = exchange.sum_over(input.shard.sum(), input.grid, axes)
    ...     return dc.DistTensor(total, (), (), input.grid)
    >>> x = dc.distribute_tensor(torch.ones(1, 1, 6, 4), dc.ProcessGrid(height=2))
    >>> torch.sum(x).item()
    24.0
    """

    def register(rule: Rule) -> Rule:
        for function in functions:
            RULES[function] = rule
        return rule

    return register


class UnsupportedOperation(NotImplementedError):
    """The error for an operator, or an argument, that is unsupported for the operands' layouts.

    The error is raised on every rank before any message is sent. Its text names the operator, the
    layouts, and the way out.
    """


def refuse(operator: str, reason: str, *operands: Any, way_out: str) -> NoReturn:
    """Raise `UnsupportedOperation` with the reason, the layouts of the operands and the way out.

    `operator` is the name of the unsupported function.
    """
    tensors = [x for x in operands if isinstance(x, DistTensorBase)]
    where = "; ".join(f"{tuple(x.shape)} {x.grid_layout} on {x.grid}" for x in tensors)
    raise UnsupportedOperation(f"{operator}: {reason} [{where}]. {way_out}")


_SAVE = (
    "Save x.full_tensor(), or x.to_local() on every rank; save sharded parameters and their "
    "optimizers by distconv.full_state_dict(...)"
)


_PARAMETRIZE = (
    "Apply parametrizations, such as weight_norm or spectral_norm, before parallelize, or after "
    "distconv.unparallelize(model)"
)


ADVICE_SERIAL = (
    "Use plain tensors and the serial module: the module before parallelize, or "
    "distconv.unparallelize(copy.deepcopy(model)); instead of torch.func's transforms use "
    "torch.autograd.grad and loops"
)
"""Advice in errors for tools that trace or transform the functions within a module."""


WAYS_OUT: dict[Any, str] = {
    torch_private.is_view: "torch.export and similar tools bypass torch's functions. "
    f"{ADVICE_SERIAL}",
    torch.Tensor.untyped_storage: "The memory belongs to x.to_local(), this rank's block. Pass "
    f"input_size= to tools that summarize a module, such as torchinfo. {ADVICE_SERIAL}",
    **{
        function: "Read the strides or memory of x.to_local(), this rank's block, or of "
        "x.full_tensor()"
        for function in (torch.Tensor.storage_offset, torch.Tensor.data_ptr)
    },
    torch_private.make_dual: "Use torch.autograd.grad; forward-mode derivatives are not supported",
    torch.Tensor.__reduce_ex__: _SAVE,
    torch_private.compatible_types: "Convert a module before parallelize",
    torch.norm_except_dim: _PARAMETRIZE,
    torch.nn.functional.normalize: f"Use the returned tensor. {_PARAMETRIZE}",
    torch.ops.aten.set_.source_Tensor: _PARAMETRIZE,
    torch.ops.aten.alias.default: (
        "Pass x.full_tensor() to functions that create tensors of another type, such as MONAI's "
        "MetaTensor"
    ),
    torch.eye: "Copy it from a plain tensor: x.copy_(torch.eye(n, m))",
}
"""For functions without a rule that users are known to call, the advice in the error."""


def way_out_of(function: Any) -> str:
    """Return the advice that the error about `function`, which has no rule, gives to the user."""
    if isinstance(function, (torch.ScriptMethod, torch.ScriptFunction)):
        return "Use the module or function as it was before torch.jit.script or torch.jit.trace"
    return WAYS_OUT.get(
        function,
        "Compute it on the whole tensor, x.full_tensor(), or, if it is elementwise, on "
        "x.to_local()",
    )


UNCHECKED = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.__deepcopy__}
"""Functions whose tensors are not checked by `check_recorded` before the rule.

Their plain tensors are not operands, are copied before, or are checked one by one."""


ALIASES = {"axis": "dim", "keepdims": "keepdim"}
"""numpy's names of arguments, which torch accepts."""


_PROPERTIES = (
    *("dtype", "device", "layout", "ndim", "itemsize", "nbytes"),
    *("is_cpu", "is_cuda", "is_ipu", "is_maia", "is_meta", "is_mkldnn", "is_mps", "is_mtia"),
    *("is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_vulkan", "is_xla", "is_xpu"),
)


_QUESTIONS = (
    *("numel", "is_floating_point", "is_complex", "is_signed"),
    *("is_inference", "is_distributed"),
)


METADATA: set[Any] = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "ndimension", "nelement")),
    *(torch.Tensor.element_size, torch.Tensor.get_device, torch.get_device, torch.result_type),
    *(getattr(kind, name) for kind in (torch, torch.Tensor) for name in _QUESTIONS),
}


# Keep torch's compilers, tracers and transforms out of distconv's computations.
#
# These tools cannot trace messages. `torch.compile` breaks its graph at functions of distconv; all
# others raise an error.


class SerialTrace:
    """The state of `compile`: hooks of the library are off while it traces the serial program."""

    under_way = False


class ReplayTrace(Protocol):
    """A torch dispatch mode that records a program's kernels and messages, to replay them."""

    paused: bool

    def __enter__(self) -> object: ...

    def __exit__(self, *error: Any) -> object: ...

    def has_made_zeros(self, x: Tensor) -> bool:
        """Return whether the traced program has made `x` as zeros, so that replays do, too."""

    def opaque(self, function: Callable[..., Any], *tensors: Tensor) -> Sequence[Tensor]:
        """Call `function(*tensors)`, recorded as one step that each replay calls again."""


_traces: list[ReplayTrace] = []


@contextmanager
def replay_trace(mode: ReplayTrace) -> Iterator[None]:
    """Enter a torch dispatch mode of the library, which `others_look_on` does not count."""
    with mode:
        _traces.append(mode)
        try:
            yield
        finally:
            _traces.pop()


def is_traced() -> bool:
    """Return whether the library now records the program for replays (`compiling/trace.py`).

    The result is False within an opaque call, which replays call again as a whole (`opaque.py`).
    """
    return any(not trace.paused for trace in _traces)


def is_traced_zeros(x: Tensor) -> bool:
    """Return whether the library records the program, and the program has made `x` as zeros."""
    return any(trace.has_made_zeros(x) for trace in _traces)


def called_in_replays(function: Callable[..., Any], *tensors: Tensor) -> Sequence[Tensor]:
    """Return `function(*tensors)`; if the program is recorded, replays call `function` again."""
    return _traces[-1].opaque(function, *tensors) if is_traced() else function(*tensors)


def others_look_on() -> bool:
    """Return whether a torch dispatch mode is active that is not one of this library's own."""
    return count_modes() > len(_traces)


# The calls of parallelized modules that are now running, innermost first.


class ModuleCall:
    """A running call of a parallelized module, and the tensors whose redistributed copies it keeps.

    Attributes
    ----------
    of: the object on whose behalf the call was entered, such as the module's guard.
    outer: the enclosing call, or None.
    """

    def __init__(self, of: object, frame: FrameType, outer: ModuleCall | None) -> None:
        self.of, self.outer = of, outer
        self._frame = frame
        self._handled = sys.exc_info()[1]
        self._holders: list[ref[DistTensorBase]] = []

    @property
    def under_way(self) -> bool:
        """Return whether the function that entered the call is still running.

        The result is False for a call that an exception, or torch.export, has interrupted before
        `leave`.
        """
        try:
            self._frame.clear()
        except RuntimeError:  # it is executing
            return True
        return False

    @property
    def failed(self) -> bool:
        """Return whether an exception that was raised during the call is being handled."""
        return sys.exc_info()[1] is not self._handled

    @property
    def outermost(self) -> bool:
        """Return whether no enclosing call was entered on behalf of the same object `of`."""
        call = self.outer
        while call is not None and call.of is not self.of:
            call = call.outer
        return call is None

    def note(self, x: DistTensorBase) -> None:
        """Register `x`, weakly, to free its redistributed copies when the call ends."""
        self._holders.append(ref(x))

    def leave(self) -> None:
        """End the call and calls within it, and free redistributed copies of its tensors."""
        _CALLS.set(self.outer)
        for each in self._holders:
            x = each()
            if x is not None:
                x._redistributed.clear()


_CALLS: ContextVar[ModuleCall | None] = ContextVar("distconv_in_module", default=None)
"""The innermost call that was entered and not left; an exception may have ended it."""


def enter_call(of: object = None, depth: int = 1) -> ModuleCall:
    """Enter a call of a parallelized module on behalf of the object `of`, and return the call.

    The call ends at the latest when the function `depth` frames further out returns.
    """
    call = ModuleCall(of, sys._getframe(depth), innermost_call())
    _CALLS.set(call)
    return call


def innermost_call() -> ModuleCall | None:
    """Return the innermost active call of a parallelized module, or None."""
    call = _CALLS.get()
    while call is not None and not call.under_way:
        call.leave()
        call = call.outer
    return call


def outermost_call() -> ModuleCall | None:
    """Return the outermost active call of a parallelized module, or None."""
    call = innermost_call()
    while call is not None and call.outer is not None:
        call = call.outer
    return call


# The `grad_fn` of a DistTensor: the autograd node of its shard.


class ShardNode:
    """The `grad_fn` of a DistTensor: the autograd node of its shard, without hooks.

    `find` returns the node. A hook of the node would get this rank's part of the gradient, not the
    serial gradient, so registering a hook raises UnsupportedOperation. A node that calls hooks with
    serial gradients has an attribute `serial_hooks`, a list of hooks. A node of a user's autograd
    Function has this Function as its attribute `function`.
    """

    __slots__ = ("_find",)

    def __init__(self, find: Callable[[], Any]) -> None:
        self._find = find

    @property
    def _node(self) -> Any:
        return self._find()

    def name(self) -> str:
        """Return the name that the node has in serial torch."""
        function = getattr(self._node, "function", None)
        shown: str = self._node.name() if function is None else f"{function.__name__}Backward"
        return shown

    def __getattr__(self, name: str) -> Any:
        if name == "register_hook" and hasattr(self._node, "serial_hooks"):
            return self._node.serial_hooks.append
        if name in ("register_hook", "register_prehook"):
            refuse(
                f"grad_fn.{name}",
                "the hook, of a node or by register_backward_hook of a module, would receive only "
                "this rank's part of the gradients",
                way_out="Use register_full_backward_hook of the module, or a forward hook that "
                "calls register_hook on the module's output",
            )
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        return self._node == (other._node if isinstance(other, ShardNode) else other)

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return repr(self._node)
