"""All private parts of torch that distconv uses, and the places where torch is patched.

A docstring says what its entry is for, or what goes wrong without the entry. An entry that names no
versions was seen in torch 2.6, 2.11, 2.13, 2.14 and 2.15. Each has a test of its own in
`tests/test_torch_private.py`. No other module names a private part of torch. Importing distconv
patches nothing; see `at_first_grid`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, _ops, nn
from torch._C._dynamo import eval_frame
from torch.autograd import Function, Variable, profiler
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import _engine_run_backward
from torch.nn import _reduction
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.modules._functions import BackwardHookFunction as BackwardHookFunction
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

_TENSOR = vars(torch._C.TensorBase)
_KERNELS: Any = torch._C._nn

# Patches

_patches: list[Callable[[], None]] | None = []
"""Functions that install patches at the first grid; None once they were called."""


def at_first_grid(install: Callable[[], None]) -> None:
    """Call `install`, which patches torch, when this process makes its first grid.

    If there is a grid already, `install` is called at once. A program that imports distconv and
    makes no grid leaves torch as it is.
    """
    if _patches is None:
        install()
    else:
        _patches.append(install)


def install_patches() -> None:
    """Install the patches of `at_first_grid`, once; every new grid calls this function."""
    global _patches
    if _patches is not None:
        waiting, _patches = _patches, None
        for install in waiting:
            install()


class _Data:
    """The descriptor `torch.Tensor.data` with distconv's setter, and torch's own getter.

    `torch.Tensor.data` itself is still torch's descriptor, for which distconv has rules.
    """

    def __init__(self, assign: Callable[[Tensor, Any], None]) -> None:
        self._assign = assign

    def __get__(self, x: Tensor | None, owner: type | None = None) -> Any:
        return _TENSOR["data"] if x is None else _TENSOR["data"].__get__(x)

    def __set__(self, x: Tensor, value: Any) -> None:
        self._assign(x, value)


def replace_data_setter(assign: Callable[[Tensor, Any], None]) -> None:
    """Let `assign(x, value)` set `.data` of any tensor.

    torch's own setter crashes if a program sets `.data` of a plain tensor to a DistTensor: it
    copies the metadata, but no memory.
    """
    torch.Tensor.data = _Data(assign)  # type: ignore[assignment]


def replace_apply(apply: Callable[..., Any]) -> None:
    """Let `apply(cls, *arguments, **keywords)` run when a program calls `Function.apply`.

    `Function` is any `torch.autograd.Function`; with torch's own `apply` the gradients of
    DistTensors are lost. Up to torch 2.13 the replacement is a method that `Function.apply` calls,
    so references to `Function.apply` that the program took earlier also use the replacement. From
    2.14 on `Function.apply` itself is replaced, and calls by earlier references raise
    UnsupportedOperation.
    """
    beneath: Any = Function if vars(Function)["apply"] is compiled_apply else _SingleLevelFunction
    beneath.apply = classmethod(apply)


def apply_of_torch(function: Any) -> Callable[..., Any]:
    """Return torch's own `apply` of the autograd Function `function`, which no patch replaces."""
    found: Callable[..., Any] = super(_SingleLevelFunction, function).apply
    return found


def replace_saved_inputs(
    save: Callable[[tuple[Any, ...]], tuple[list[Any], Any]],
    restore: Callable[[list[Any], Any], list[Any]],
) -> None:
    """Let non-reentrant checkpoints keep `save(inputs)` in place of their inputs.

    `save` returns tensors and a note; at recomputation `restore(tensors, note)` returns the inputs.
    torch 2.13 and later save inputs on the enclosing graph, where an enclosing checkpoint finds no
    DistTensor at recomputation, and raises. Earlier versions keep inputs unchanged, and are not
    patched.
    """
    frame: Any = checkpoint._CheckpointFrame
    if not hasattr(frame, "save_inputs"):
        return
    keep, get = frame.save_inputs, frame.get_inputs

    def save_inputs(self: Any, *inputs: Any) -> None:
        tensors, self.distconv_note = save(inputs)
        keep(self, *tensors)

    def get_inputs(self: Any) -> list[Any]:
        return restore(get(self), self.distconv_note)

    frame.save_inputs, frame.get_inputs = save_inputs, get_inputs


def keeps_inputs(function: Any) -> bool:
    """Return whether `function` is the autograd Function by which checkpoints keep inputs.

    This Function, of torch 2.11 and 2.12, works with DistTensors, so distconv must not raise for
    it.
    """
    kept = (function.__module__, function.__name__) == (checkpoint.__name__, "_NoopSaveInputs")
    return kept and torch.__version__ >= "2.11"


@contextmanager
def profiler_refused(refuse: Callable[..., Any]) -> Iterator[None]:
    """Call `refuse` if the program starts torch's profiler within the context.

    A second profiler would end the recording of the first silently.
    """
    module: Any = profiler
    prepare = module._prepare_profiler
    module._prepare_profiler = refuse
    try:
        yield
    finally:
        module._prepare_profiler = prepare


# Autograd

backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of this thread's current backward pass, -1 outside of a pass. Without it,
gradients of two passes are treated as one, and steps of backward passes are compared although their
order may differ."""

current_node: Callable[[], Any] = torch._C._current_autograd_node
"""Return the autograd node that this thread's backward pass runs, or None. Without it, recordings
cannot attribute the work of a backward pass to layers."""

next_node_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Return the sequence number of the node that autograd records next; see `current_node`."""


def node_number(node: Any) -> int | None:
    """Return the sequence number that autograd gave a node when recording it; see `current_node`.

    Returns None for None, and for nodes that accumulate the gradient of a leaf, which all have the
    largest number.
    """
    number = None if node is None else node._sequence_nr()
    return None if number is None or number >= 2**62 else number


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call `call()` when the current backward pass has run its whole graph.

    distconv completes the reductions of gradients in `call`, before `backward()` returns.
    """
    Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


compiled_apply: Any = vars(torch._C._FunctionBase)["apply"]
"""`Function.apply` in compiled code. For each of distconv's own functions, Python's version
searches all arguments for wrappers of torch.func."""


def roots_of_backward() -> list[Tensor]:
    """Return the tensors at which the current backward pass started; [] if unknown.

    Autograd does not expose these tensors. They are read from the frame of torch's own function
    that runs the pass; on GPUs another thread runs the nodes. With them distconv detects a plain
    penalty that reaches a parallelized module's parameters, whose gradients would be too large by
    the number of ranks.
    """
    found = _started_below(sys._getframe(1))
    if found is None:
        own = threading.get_ident()
        others = (frame for thread, frame in sys._current_frames().items() if thread != own)
        found = next((x for x in map(_started_below, others) if x is not None), [])
    return found


def _started_below(frame: Any) -> list[Tensor] | None:
    """Return the roots of the backward pass that `frame`, or a caller of it, runs; else None."""
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        frame = frame.f_back
    if frame is None:
        return None
    return [x for x in frame.f_locals.get("t_outputs", ()) if isinstance(x, Tensor)]


# Tensors

make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
"""Make a tensor of a subclass with a shape and without memory. DistTensor is made by this
function."""

set_data: Callable[[Tensor, Tensor], None] = _TENSOR["data"].__set__
"""Set `.data` as torch does, for the function given to `replace_data_setter`."""

is_view: Callable[[Tensor], bool] = torch.Tensor._is_view  # type: ignore[attr-defined]
"""Return whether a tensor is a view. Without it, a plain view becomes distributed, but not its
base."""


base_of: Callable[[Tensor], Tensor | None] = _TENSOR["_base"].__get__
"""Return the tensor of which `x` is a view, or None. Without it, unwritten blocks are treated as
written, and reductions of gradients are copied in each step."""


is_zero_tensor: Callable[[Tensor], bool] = torch.Tensor._is_zerotensor  # type: ignore[attr-defined]
"""Return whether a tensor is zeros without memory, as some gradients are; such a tensor has no
address to send."""

hooks_of: Callable[[Tensor], Any] = _TENSOR["_backward_hooks"].__get__
"""Return the dictionary of the hooks of a tensor, or None. Without it, a program's hooks on a
parameter get this rank's contribution to the gradient, not the sum."""

accumulation_hooks_of: Callable[[Tensor], Any] = _TENSOR["_post_accumulate_grad_hooks"].__get__
"""Return the dictionary of a tensor's post-accumulate-gradient hooks, or None; see `hooks_of`."""


def address_of_memory(x: Tensor) -> int:
    """Return a number that identifies the memory of a tensor, even of one without elements.

    Dry runs use it to count the memory of tensors that share it only once.
    """
    number: int = x.untyped_storage()._cdata
    return number


def users_of_memory(x: Tensor) -> int:
    """Return the number of tensors and Python objects that hold the memory of `x`.

    A plain tensor must not become distributed while a view of it keeps the old elements.
    """
    memory: Any = x.untyped_storage()  # the object holds a use, whether it existed before or not
    count: int = torch._C._storage_Use_Count(memory._cdata)  # type: ignore[attr-defined]
    return count


users_of: Callable[[Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
"""Return the number of places in compiled code that hold a tensor; see `users_of_memory`."""


def mark_parameter(x: Tensor) -> None:
    """Make `isinstance(x, torch.nn.Parameter)` true, so that modules accept sharded weights."""
    x._is_param = True  # type: ignore[attr-defined]


def is_marked_parameter(x: Tensor) -> bool:
    """Return whether `mark_parameter` was called with `x`."""
    return getattr(x, "_is_param", False)


# Dispatch

without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which torch does not dispatch to subclasses. Without it, reading a DistTensor's
metadata recurses forever."""

without_torch_dispatch: Any = torch._C._DisableTorchDispatch
"""A context in which torch does not dispatch to subclasses, also below its functions. Without it,
the shape of a DistTensor cannot change in place."""

no_torch_function: Any = torch._C._disabled_torch_function_impl
"""A `__torch_function__` that turns dispatch off for a subclass: autocast's stand-ins for
tensors."""

without_modes: Any = _disable_current_modes
"""A context without dispatch modes. Without it, checks on tensors without elements are recorded as
work of the program."""

DispatchMode = TorchDispatchMode
"""The base of dispatch modes, which see operators below torch's functions. Without it, recordings
see no operators."""

autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Return whether autocast is on for any device. Without it, each operator must ask all devices."""

count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of active dispatch modes. A tool that records through such a mode would record
this rank's blocks, and no messages."""

innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""Return the active transform of torch.func, or None; see `count_modes`."""

is_traced_by_jit: Callable[[], bool] = torch._C._is_tracing
"""Return whether torch.jit.trace is active. `torch.jit.is_tracing` costs two more Python calls."""

_modes_before_dispatch: list[Any] = vars(_ops._mode_stack_state_for_pre_dispatch)[
    "_ModeStackStateForPreDispatch__infra_modes"
]

make_fx_before_dispatch: Callable[[], Any] = partial(_modes_before_dispatch.__getitem__, 0)
"""Return the active mode of make_fx or torch.export before dispatch, or None; see `count_modes`."""

_TRACERS = {
    torch._C._TorchDispatchModeKey.FUNCTIONAL: "AOTAutograd",
    torch._C._TorchDispatchModeKey.FAKE: "FakeTensorMode, or torch.export",
    torch._C._TorchDispatchModeKey.PROXY: "make_fx",
}


def tracing_mode() -> str:
    """Return the name of the tool that traces the program below torch's functions; "" for none.

    Dispatch modes of users only observe, and are ignored.
    """
    get = torch._C._get_dispatch_mode
    return next((name for mode, name in _TRACERS.items() if get(mode) is not None), "")


Called = TypeVar("Called", bound=Callable[..., Any])


def run_eagerly(function: Called) -> Called:
    """Let torch.compile break its graph at `function`, and run it and its callees uncompiled.

    `torch.compiler.disable` does the same, but imports the compiler into every program. torch 2.6
    has no way to mark code, and torch.compile fails with distconv.
    """
    marks: Any = function
    marks._torchdynamo_disable = True
    marks._torchdynamo_disable_msg = "distconv runs eagerly, between the graphs of the rest"
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(marks.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


_EXACT = {
    "assume_dunder_attributes_remain_unchanged": False,
    "guard_nn_modules_using_dict_tags": False,
    "skip_guards_on_constant_func_defaults": False,
    "skip_nnmodule_hook_guards": False,
    "skip_no_tensor_aliasing_guards_on_parameters": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "trace_numpy": False,
    "use_recursive_dict_tags_for_guards": False,
}


def guard_exactly(within: Callable[[], bool]) -> None:
    """Let torch.compile guard everything that it reads, or break its graph, if `within()` is true.

    By default torch.compile does not guard hooks, defaults of functions and properties of
    parameters, and replaces numpy's functions by torch's. Without this function, compiled programs
    would use old values. Changing these settings takes longer than a compiled call, so they are
    changed only while torch.compile traces.
    """
    from torch._dynamo import config, on_compile_end, on_compile_start

    changed: list[Any] = []

    def start(*_: Any) -> None:
        if within():
            names = {name: x for name, x in _EXACT.items() if hasattr(config, name)}
            changed.append(config.patch(names))
            changed[-1].__enter__()

    def end(*_: Any) -> None:
        if changed:
            changed.pop().__exit__(None, None, None)

    on_compile_start(start)
    on_compile_end(end)


def register_backend(name: str, make: Callable[[Any], Any]) -> None:
    """Let `torch.compile(program, backend=name)` return `make(program)` from now on.

    An ordinary backend gets graphs only, never tensors that torch.compile cannot trace.
    """
    from torch import _dynamo

    optimize = _dynamo.optimize

    def chosen(*args: Any, **options: Any) -> Any:
        named = getattr(options.get("backend"), "compiler_name", None) == name
        return make if named else optimize(*args, **options)

    _dynamo.optimize = chosen  # type: ignore[assignment]


def is_fake(x: Tensor) -> bool:
    """Return whether a tensor has no elements, as in a graph that torch.compile is tracing."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


def unknown_in_graph(module: Any) -> str:
    """Return the name of a function in a graph of torch.compile that distconv cannot run, or "".

    Such functions contain whole graphs, for example of a program's autograd functions, or return
    the version of a tensor, a number that changes without a guard. Checkpoints are supported:
    torch's function for a checkpoint is replaced in the graph by `torch.utils.checkpoint`.
    """
    for node in module.graph.nodes:
        if str(node.target) == "prims._tensor_version.default":  # torch registers it on demand
            return "the version of a tensor, x._version"
        if not isinstance(node.target, _ops.HigherOrderOperator):
            continue
        if node.target is not getattr(torch.ops.higher_order, "tag_activation_checkpoint", None):
            return str(node.target)
        node.target = _checkpointed
    return ""


def _checkpointed(graph: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Checkpoint a graph; as in the program, parameters and buffers are not arguments."""
    given = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and not x.is_leaf]

    def run(*moving: Any) -> Any:
        together = dict(enumerate(inputs)) | dict(zip(given, moving, strict=True))
        return graph(*together.values())

    options["use_reentrant"] = False
    return checkpoint.checkpoint(run, *(inputs[i] for i in given), **options)


conversion: Any = torch.ops.aten._to_copy.default
"""The operator by which torch converts types and devices. Without it, autocast's conversions are
not seen."""


Operator = _ops.OpOverload
"""The type of operators below torch's functions. Without it, compiled steps cannot tell operators
from other calls."""


is_mutable: Callable[[Any], bool] = attrgetter("_schema.is_mutable")
"""Return whether an operator of `torch.ops` writes to an argument. Without it, timings and
recordings share results that are written to."""


def signature_of(operator: Any) -> str:
    """Return the schema of an operator of `torch.ops`, from "(" on: arguments and results.

    distconv registers some operators again under this schema: compilers then call torch's kernel,
    as the loops that they would generate are slower.
    """
    return "(" + str(operator._schema).partition("(")[2]


is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled
"""Return whether torch's profiler is recording; see `profiler_refused`."""

# Functions and kernels

max_pool_with_places: dict[int, Callable[..., Any]] = {
    2: _KERNELS.max_pool2d_with_indices,
    3: _KERNELS.max_pool3d_with_indices,
}
"""Maximum pooling with the places of the maxima, by spatial dimensions, without the checks of
torch.nn.functional, which do not fit blocks."""

adaptive_max_pool: dict[int, Callable[..., Any]] = {
    2: _KERNELS.adaptive_max_pool2d,
    3: _KERNELS.adaptive_max_pool3d,
}
"""Adaptive maximum pooling, with places, by spatial dimensions; see `max_pool_with_places`."""

pad: Callable[..., Tensor] = _KERNELS.pad
"""The name by which parts of torch call `torch.nn.functional.pad`. Without it, no rule covers such
calls."""

_UPSAMPLING = {
    "nearest": ("upsample_nearest{}d",),
    "nearest-exact": ("_upsample_nearest_exact{}d",),
    "linear": ("upsample_linear1d",),
    "bilinear": ("upsample_bilinear2d", "_upsample_bilinear2d_aa"),
    "trilinear": ("upsample_trilinear3d",),
    "bicubic": ("upsample_bicubic2d", "_upsample_bicubic2d_aa"),
}


def upsampling(mode: str, antialias: bool, spatial: int) -> Callable[..., Tensor]:
    """Return the kernel of `torch.nn.functional.interpolate` for a mode and spatial dimensions.

    The kernel takes both sizes and scales: a block needs the scales of the global tensor.
    """
    kernel: Callable[..., Tensor] = getattr(_KERNELS, _UPSAMPLING[mode][antialias].format(spatial))
    return kernel


_FLASH: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def flash_attention(
    operands: Sequence[Tensor], is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention by torch's kernel for CPUs, and the log-sum-exp of each query's scores.

    The log-sum-exp is needed to combine the attention to several blocks of keys. `operands` are
    query, key and value, of four dimensions, the last of which is contiguous.
    """
    out, sums = _FLASH(*operands, 0.0, is_causal, scale=scale)
    return out, sums


def flash_attention_backward(
    operands: Sequence[Tensor], sums: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    `operands` are the gradient of the result, query, key, value and the result. The result and the
    log-sum-exp `sums` may be of more keys than `key` has.
    """
    grad, query, key, value, out = operands
    found = _FLASH_BACKWARD(
        grad, query, key, value, out, sums, 0.0, is_causal, attn_mask=None, scale=scale
    )
    return found  # type: ignore[no-any-return]


assert_async: Callable[..., None] = torch._assert_async
"""Raise if a one-element tensor is 0; on a GPU, the host does not wait for the result."""

is_all_true: Callable[[Tensor], Tensor] = torch._is_all_true
is_any_true: Callable[[Tensor], Tensor] = torch._is_any_true
"""Return whether all, or any, elements are true. torch.distributions calls both functions to check
its arguments."""

standard_gamma: Callable[..., Tensor] = torch._standard_gamma
standard_gamma_grad: Callable[[Tensor, Tensor], Tensor] = torch._standard_gamma_grad
sample_dirichlet: Callable[..., Tensor] = torch._sample_dirichlet
dirichlet_grad: Callable[[Tensor, Tensor, Tensor], Tensor] = torch._dirichlet_grad
"""Draw gamma and Dirichlet numbers, and return their derivatives. torch.distributions calls these
functions."""

unscale_gradients: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiply gradients in place, and record whether values are not finite. Without it GradScaler has
no rule."""


def of_lists(name: str) -> Callable[..., Any]:
    """Return torch's private function that applies `name`, such as "add_", to lists of tensors.

    For "add_" the function is `torch._foreach_add_`. torch's optimizers, averages of weights and
    clipping of gradients call such functions.
    """
    function: Callable[..., Any] = getattr(torch, f"_foreach_{name}")
    return function


def of_sequence(name: str) -> Callable[..., Any]:
    """Return torch's private function for a sequence of tensors, such as `atleast_1d([x, y])`.

    Without it, such a call is unsupported, unlike `atleast_1d(x, y)`.
    """
    function: Callable[..., Any] = getattr(torch._C._VariableFunctions, name)
    return function


def fused_step(optimizer: str) -> Callable[..., Any]:
    """Return the function that a fused optimizer such as "adam" calls in a step."""
    function: Callable[..., Any] = getattr(torch, f"_fused_{optimizer}_")
    return function


make_dual: Callable[..., Any] = torch._C._VariableFunctions._make_dual
"""Make a tensor with a tangent. Without it, torch's forward mode raises an error without a
remedy."""

compatible_types: Callable[..., bool] = torch._has_compatible_shallow_copy_type
"""Return whether `.data` of a tensor can become another tensor. Without it, `module.to` of a
parallelized module raises an error without a remedy."""

reduction_of_flags: Callable[..., str] = _reduction.legacy_get_string
"""Return the reduction of a loss for torch's deprecated `size_average` and `reduce`."""

unpooled_size: Callable[..., Any] = F._unpool_output_size  # type: ignore[attr-defined]
"""Return the spatial size of the result of max unpooling, with torch's checks of `output_size`."""

fans: Callable[[Tensor], tuple[int, int]] = nn.init._calculate_fan_in_and_fan_out
"""Return fan-in and fan-out of a weight from its global shape; torch's `kaiming_uniform_` would use
the shape of a block."""


def only_raises(function: Callable[..., Any]) -> bool:
    """Return whether a function of linear algebra does nothing but raise an error.

    Some functions do from torch 2.13 on. A rule for such a function must raise as well.
    """
    return function.__module__ == "torch._linalg_utils"


def dropped_weight(loss: Callable[..., Any]) -> Any:
    """Return the weight with which the program has called `loss` of torch.nn.functional, or None.

    `l1_loss` of torch 2.6 to 2.15 does not pass its weight on to a subclass, which would ignore the
    weight. The weight is therefore read from the frame of torch's own function.
    """
    frame: Any = sys._getframe(1)
    for _ in range(8):
        if frame is None or frame.f_code is loss.__code__:
            break
        frame = frame.f_back
    else:
        return None
    return None if frame is None else frame.f_locals.get("weight")


def _copied(function: Any, **names: Any) -> Callable[..., Any]:
    """Return a copy of a function with the code that it has now; `names` replace global names."""
    around = {**function.__globals__, **names} if names else function.__globals__
    copy = FunctionType(function.__code__, around, function.__name__, function.__defaults__)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    return copy


def composition(function: Any) -> Callable[..., Any]:
    """Return a copy of a Python function of torch that is never dispatched to a tensor subclass.

    torch dispatches `multi_head_attention_forward` as a whole to DistTensor. The copy runs instead,
    and each function that the copy calls is dispatched, so distconv needs no version of torch's 300
    lines.
    """
    return _copied(function, has_torch_function=lambda *_: False)


# Modules

BatchNorm: Any = _BatchNorm
"""The base of torch's batch norms, also of other packages'. Without it, planning reads the values
of batch counters, which have no elements in a dry run."""

CODE_OF_MODULE_CALL: CodeType = nn.Module._call_impl.__code__
"""The code that runs a module's call. Messages, plans and timelines name their layer by searching
the stack for frames of this code, so that calls need not be recorded."""


parts_and_parameters: Callable[[Any], Any] = attrgetter("_parameters", "_modules")
"""Return the dictionaries of a module's own parameters and of its direct submodules. Without it,
detecting a changed module takes as long as torch's walk through all submodules."""

hooks_of_module: Callable[[nn.Module], Any] = attrgetter("_forward_pre_hooks", "_forward_hooks")
"""Return the dictionaries of hooks before and after `forward`. Copies of a parallelized module keep
hooks, but not the handles that remove hooks; without it, copies would stay parallelized."""


def innermost_saved_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """Return the innermost active `saved_tensors_hooks`, (pack, unpack), or None.

    torch calls only the innermost hooks. A module's hooks for its own weights therefore need the
    enclosing hooks, such as those of `save_on_cpu`, to pass other tensors on.
    """
    found: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found  # type: ignore[no-any-return]


def in_selective_checkpoint() -> bool:
    """Return whether a policy of selective checkpointing chooses which results are kept.

    Without it a convolution that writes boundary outputs into its result fails in the backward
    pass: torch keeps the result, which must not be written then.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


_SELECTIVE = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode


def versions_in_state(state: Mapping[str, Any]) -> Any:
    """Return the modules' versions in a `state_dict()`, or None if it has none.

    By these versions modules know how to read states of earlier torch versions.
    """
    return getattr(state, "_metadata", None)


def set_versions_in_state(state: Any, versions: Any) -> None:
    """Set the modules' versions in a `state_dict()`; see `versions_in_state`."""
    state._metadata = versions


def inner_schedulers(scheduler: Any) -> list[Any]:
    """Return the schedulers that a SequentialLR or ChainedScheduler contains; [] for others."""
    return list(getattr(scheduler, "_schedulers", ()))


flex_attention_of_torch = _copied(flex_attention)
"""torch's `flex_attention` as it is before `replace_flex_attention`."""


def replace_flex_attention(replacement: Callable[..., Any]) -> None:
    """Let `replacement` run when a program calls torch's `flex_attention`.

    torch does not dispatch `flex_attention` to subclasses, but compiles the function for
    subclasses, and fails. The function's code is replaced, as programs hold references to the
    function itself.
    """
    function: Any = flex_attention
    function.__wrapped__, function.replacement = flex_attention_of_torch, replacement
    function.__code__, function.__defaults__ = _replaced_flex_attention.__code__, None


def _replaced_flex_attention(*args: Any, **kwargs: Any) -> Any:
    return flex_attention.replacement(*args, **kwargs)  # type: ignore[attr-defined]


def in_data_parallel() -> bool:
    """Return whether the forward pass of a DistributedDataParallel is running.

    DistributedDataParallel would divide the gradients of a parallelized part by the number of
    ranks.
    """
    return DistributedDataParallel._active_ddp_module is not None


def before_data_parallel(check: Callable[[nn.Module, str, nn.Module], None]) -> None:
    """Call `check(wrapper, "module", module)` before a DistributedDataParallel is made.

    Without it torch first asks for a process group, which a program with distconv does not need.
    """
    make: Any = DistributedDataParallel.__init__

    @wraps(make)
    def checked(self: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        check(self, "module", module)
        make(self, module, *args, **kwargs)

    DistributedDataParallel.__init__ = checked  # type: ignore[method-assign]


def before_fully_shard(check: Callable[[nn.Module], None]) -> None:
    """Call `check(module)` before `fully_shard` shards a module.

    Without it the error is raised in the first forward pass, when the parameters are sharded
    already. If the program has not imported `fully_shard`, which takes seconds, nothing is done.
    """
    state: Any = getattr(sys.modules.get(_FULLY_SHARD), "FSDPState", None)
    if state is None or hasattr(state.init, "__wrapped__"):
        return
    init: Any = state.init

    @wraps(init)
    def checked(self: Any, modules: Sequence[nn.Module], *args: Any, **kwargs: Any) -> None:
        for module in modules:
            check(module)
        init(self, modules, *args, **kwargs)

    state.init = checked


_FULLY_SHARD = "torch.distributed.fsdp._fully_shard._fsdp_state"


def is_flat_parameter(x: Tensor) -> bool:
    """Return whether FSDP made `x` of several parameters; FSDP itself sums the gradient of `x`."""
    return hasattr(x, "_is_flat_param")


# torch.distributed, which is imported where it is used

gather_flat: Callable[[Any], Callable[..., Any]] = attrgetter("_allgather_base")
"""Return the method of a process group that all-gathers into one tensor. The public function
accepts default groups only, and distconv makes groups of its own."""


def start_batch(group: Any) -> None:
    """Begin a batch of messages between accelerators, which all start together in `end_batch`.

    `group` is a backend of torch.distributed, not a default group, whose methods take a device.
    Outside of a batch, two ranks that send to each other wait forever.
    """
    group._start_coalescing()


def end_batch(group: Any) -> Any:
    """Start the messages queued since `start_batch`, and return their request."""
    return group._end_coalescing()


def set_limit(options: Any, limit: Any) -> None:
    """Set the time limit in the options of a process group; torch's own is 10 minutes."""
    options._timeout = limit


def end_group(group: Any, abort: bool) -> None:
    """End a process group between accelerators: at once if `abort`, else when its work is done.

    Otherwise its threads would outlive the interpreter. Since torch 2.7 the methods have public
    names.
    """
    name = "abort" if abort else "shutdown"
    end = getattr(group, name, None) or getattr(group, f"_{name}", None)
    if end is not None:
        end()


def default_store() -> Any:
    """Return the store of torch.distributed's default group, in which ranks find each other."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


# The base class of autograd functions on shards, which saves the overhead of `Function.apply`.


class ShardFunction(Function):
    """A torch.autograd.Function for shards, to which torch.func is never applied.

    Its `apply` leaves out the search for wrappers of torch.func, which costs `Function.apply` time
    in Python.
    """

    apply = compiled_apply
