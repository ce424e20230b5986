"""Everything private to torch that distconv uses, and where torch itself is patched.

A name here says what breaks without its entry. Each was seen in torch 2.6, 2.11, 2.13, 2.14 and
2.15 where it names no versions, and has a test of its own in `tests/test_torch_private.py`. No
other module names a private part of torch. Nothing is patched by an import: `at_first_grid` says
when.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree, checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_TENSOR = vars(torch._C.TensorBase)
_KERNELS: Any = torch._C._nn

# Patches

_patches: list[Callable[[], None]] | None = []
"""The patches that wait for the first grid; None where they are installed."""


def at_first_grid(install: Callable[[], None]) -> None:
    """Call `install`, which patches torch, when this process makes its first grid; now if it has.

    A program that imports distconv and makes no grid has torch as it is.
    """
    if _patches is None:
        install()
    else:
        _patches.append(install)


def install_patches() -> None:
    """Install what waits for the first grid, once; every grid calls it."""
    global _patches
    if _patches is not None:
        waiting, _patches = _patches, None
        for install in waiting:
            install()


class _Data:
    """`torch.Tensor.data` with a setter of ours; asked of the class, the descriptor of torch, under
    which distconv has its rules."""

    def __init__(self, assign: Callable[[Tensor, Any], None]) -> None:
        self._assign = assign

    def __get__(self, x: Tensor | None, owner: type | None = None) -> Any:
        return _TENSOR["data"] if x is None else _TENSOR["data"].__get__(x)

    def __set__(self, x: Tensor, value: Any) -> None:
        self._assign(x, value)


def replace_data_setter(assign: Callable[[Tensor, Any], None]) -> None:
    """Let `assign` set `.data` of all tensors. torch asks no DistTensor that is assigned to a plain
    tensor: it copies a description without memory, and the process crashes."""
    torch.Tensor.data = _Data(assign)  # type: ignore[assignment]


def replace_apply(apply: Callable[..., Any]) -> None:
    """Let `apply(cls, *arguments, **keywords)` apply every `torch.autograd.Function`. torch runs a
    Function below its functions, and records it on DistTensors, whose gradients would be lost.

    Up to torch 2.13 the replacement lies beneath `Function.apply`, which programs keep by another
    name. From 2.14 on that is torch's compiled `apply` itself: kept before, it is refused.
    """
    beneath: Any = Function if vars(Function)["apply"] is compiled_apply else _SingleLevelFunction
    beneath.apply = classmethod(apply)


def apply_of_torch(function: Any) -> Callable[..., Any]:
    """Return `Function.apply` of this class as it is without `replace_apply`."""
    found: Callable[..., Any] = super(_SingleLevelFunction, function).apply
    return found


def replace_saved_inputs(
    save: Callable[[tuple[Any, ...]], tuple[list[Any], Any]],
    restore: Callable[[list[Any], Any], list[Any]],
) -> None:
    """Let checkpoints without reentry keep `save(inputs)`, tensors and a note, for the inputs of
    their function, which are `restore(tensors, note)` when it is called again.

    torch 2.13 and later save inputs on the graph around, where a checkpoint around finds no
    DistTensor when it computes again, and raises. Earlier ones hold inputs as they are.
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
    """Return whether a `torch.autograd.Function` is the one by which checkpoints without reentry
    keep their inputs, and computes right from them: in torch 2.11 and 2.12. Checkpoints would be
    refused."""
    kept = (function.__module__, function.__name__) == (checkpoint.__name__, "_NoopSaveInputs")
    return kept and torch.__version__ >= "2.11"


@contextmanager
def profiler_refused(refuse: Callable[..., Any]) -> Iterator[None]:
    """Call `refuse` where a program starts torch's profiler in this context. A second profiler ends
    the recording of the first without a word."""
    module: Any = profiler
    prepare = module._prepare_profiler
    module._prepare_profiler = refuse
    try:
        yield
    finally:
        module._prepare_profiler = prepare


# Autograd

backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass in which this thread is, -1 outside. Gradients of two
passes would count as one; steps of backward passes would be compared in an order of their own."""

current_node: Callable[[], Any] = torch._C._current_autograd_node
"""Return the node that the backward pass of this thread runs, or None. Recordings would not know to
which layer the work of a backward pass belongs."""

next_node_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Return the number of the node that autograd records next; see `current_node`."""


def node_number(node: Any) -> int:
    """Return the number that autograd gave a node when it recorded it; see `current_node`."""
    number: int = node._sequence_nr()
    return number


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call `call()` when the backward pass under way has gone through its graph. Parameters would
    have no gradients when `backward()` returns, but parts of them."""
    Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


compiled_apply: Any = vars(torch._C._FunctionBase)["apply"]
"""`Function.apply` in compiled code. Python's looks through all arguments for wrappers of
torch.func first, each time that distconv applies one of its own functions."""


def node_type(function: Any) -> type:
    """Return the type of the nodes that a `torch.autograd.Function` records. A walk through the
    graph would not know where values were handed out, or replicated."""
    kind: type = function._backward_cls
    return kind


def roots_of_backward() -> list[Tensor]:
    """Return the tensors at which the backward pass under way has started; [] if unknown.

    Autograd tells nobody. They are read from the frame of torch's own function that runs it; on
    GPUs it runs in another thread than the nodes. Without, a plain penalty of a parallelized
    module's parameters gives a gradient that is too large by the number of ranks, and no error.
    """
    found = _started_below(sys._getframe(1))
    if found is None:
        own = threading.get_ident()
        others = (frame for thread, frame in sys._current_frames().items() if thread != own)
        found = next((x for x in map(_started_below, others) if x is not None), [])
    return found


def _started_below(frame: Any) -> list[Tensor] | None:
    """Return the roots of the backward pass that this frame, or a caller of it, has started."""
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        frame = frame.f_back
    if frame is None:
        return None
    return [x for x in frame.f_locals.get("t_outputs", ()) if isinstance(x, Tensor)]


# Tensors

make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
"""Make a tensor of a subclass with a shape and without memory. No DistTensor could be made."""

set_data: Callable[[Tensor, Tensor], None] = _TENSOR["data"].__set__
"""Set `.data` as torch does, for the function given to `replace_data_setter`."""

node_of_tensor: Callable[[Tensor], Any] = _TENSOR["grad_fn"].__get__
"""Return `grad_fn` as torch has it, past a subclass. A Function recorded on the DistTensors, where
its gradients are lost, would not be found."""

GETTERS_OF_PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    name: _TENSOR[name].__get__ for name in ("real", "imag")
}
"""The functions by which `x.real` and `x.imag` reach `__torch_function__`. They get rules."""

set_requires_grad: Callable[[Tensor, bool], Any] = torch._C.TensorBase.requires_grad_
"""Set whether a tensor requires gradients, past a subclass. Results of a Function recorded on
DistTensors would not be found; see `node_of_tensor`."""

is_view: Callable[[Tensor], bool] = torch.Tensor._is_view  # type: ignore[attr-defined]
"""Return whether a tensor is a view. A plain view would become distributed, and its base not."""


base_of: Callable[[Tensor], Tensor | None] = _TENSOR["_base"].__get__
"""Return the tensor of which `x` is a view, or None. Blocks would count as written that were not,
and sums of gradients would be copied in each step."""


is_zero_tensor: Callable[[Tensor], bool] = torch.Tensor._is_zerotensor  # type: ignore[attr-defined]
"""Return whether a tensor is zeros without memory, which some gradients are. It has no address to
send from."""

hooks_of: Callable[[Tensor], Any] = _TENSOR["_backward_hooks"].__get__
"""Return the dictionary of the hooks of a tensor, or None. A program's hooks on a parameter would
get this rank's part of the gradient."""

accumulation_hooks_of: Callable[[Tensor], Any] = _TENSOR["_post_accumulate_grad_hooks"].__get__
"""Return the dictionary of the post-accumulate-gradient hooks of a tensor, or None; see
`hooks_of`."""


def address_of_memory(x: Tensor) -> int:
    """Return a number for the memory of a tensor, also without elements. Planning would count
    tensors that share memory twice."""
    number: int = x.untyped_storage()._cdata
    return number


def users_of_memory(x: Tensor) -> int:
    """Return how many tensors and Python objects hold the memory of `x`. A plain tensor would
    become distributed while a view of it goes on with the old elements."""
    memory: Any = x.untyped_storage()  # the object holds a use, whether it existed before or not
    count: int = torch._C._storage_Use_Count(memory._cdata)  # type: ignore[attr-defined]
    return count


users_of: Callable[[Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
"""Return how many places in compiled code hold a tensor; see `users_of_memory`."""


def mark_parameter(x: Tensor) -> None:
    """Let `isinstance(x, torch.nn.Parameter)` be true. Modules would not take sharded weights."""
    x._is_param = True  # type: ignore[attr-defined]


def is_marked_parameter(x: Tensor) -> bool:
    """Return whether `mark_parameter` was called with `x`."""
    return getattr(x, "_is_param", False)


# Dispatch

without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which torch asks no subclass. Asking a DistTensor for its metadata would not end."""

without_torch_dispatch: Any = torch._C._DisableTorchDispatch
"""A context in which torch asks no subclass below its functions either. The shape of a DistTensor
could not change in place."""

no_torch_function: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of subclasses that have none; autocast's stand-ins would pass by it."""

without_modes: Any = _disable_current_modes
"""A context without the modes beneath torch's functions. Checks on tensors without elements would
be counted as work of the program."""

DispatchMode = TorchDispatchMode
"""The base of modes beneath torch's functions. Recordings would see no operators."""

tree_leaves: Callable[..., list[Any]] = _pytree.tree_leaves
"""Return the leaves of nested arguments, as torch nests them; types under autocast need it."""

tree_map_only: Callable[..., Any] = _pytree.tree_map_only
"""Map the leaves of one type in nested arguments; see `tree_leaves`."""

autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Return whether autocast is on for any device. Each operator would have to ask all devices."""

is_tracing: Callable[[], bool] = torch._C._is_tracing
"""Return whether torch.jit traces. A trace would hold this rank's blocks, and no messages."""

count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of modes beneath torch's functions; see `is_tracing`."""

innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""Return the transform of torch.func under way, or None; see `is_tracing`."""

_mode_before_dispatch = _ops._mode_stack_state_for_pre_dispatch.get  # type: ignore[no-untyped-call]


def make_fx_before_dispatch() -> Any:
    """Return the mode of make_fx, or torch.export, that records before dispatch, or None; see
    `is_tracing`."""
    return _mode_before_dispatch(0)


_TRACERS = {
    torch._C._TorchDispatchModeKey.PROXY: "make_fx",
    torch._C._TorchDispatchModeKey.FAKE: "FakeTensorMode, or torch.export",
    torch._C._TorchDispatchModeKey.FUNCTIONAL: "AOTAutograd",
}


def tracing_mode() -> str:
    """Return the tool whose mode beneath torch's functions traces the program, or ""; see
    `is_tracing`. Modes of users look on, and do not count."""
    found = ""
    for mode, name in _TRACERS.items() if count_modes() else ():
        if torch._C._get_dispatch_mode(mode) is not None:
            found = name
    return found


Called = TypeVar("Called", bound=Callable[..., Any])


def run_eagerly(function: Called) -> Called:
    """Let torch.compile break its graph where `function` is called, and run it as it is, with all
    that it calls.

    `torch.compiler.disable` does it, too, and would import the compiler into every program. torch
    2.6 has no way to mark code, and torch.compile fails there.
    """
    marks: Any = function
    marks._torchdynamo_disable = True
    marks._torchdynamo_disable_msg = "distconv runs eagerly, between the graphs of the rest"
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(marks.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


conversion: Any = torch.ops.aten._to_copy.default
"""The operator by which torch converts types and devices. What autocast converts would not be
seen."""


Operator = _ops.OpOverload
"""The type of what is called below torch's functions. Compiled steps would replay other calls."""


def is_mutable(operator: Any) -> bool:
    """Return whether an operator of `torch.ops` writes to an argument. Timings and recordings would
    share results that are written to."""
    mutable: bool = operator._schema.is_mutable
    return mutable


def is_profiling() -> bool:
    """Return whether torch's profiler is recording; see `profiler_refused`."""
    found: bool = torch.autograd._profiler_enabled()
    return found


# Functions and kernels

max_pool_with_places: dict[int, Callable[..., Any]] = {
    2: _KERNELS.max_pool2d_with_indices,
    3: _KERNELS.max_pool3d_with_indices,
}
"""Maximum pooling, and the places of the maxima, by spatial dimensions: without what
torch.nn.functional does around it, which is not for blocks."""

adaptive_max_pool: dict[int, Callable[..., Any]] = {
    2: _KERNELS.adaptive_max_pool2d,
    3: _KERNELS.adaptive_max_pool3d,
}
"""Adaptive maximum pooling, with places, by spatial dimensions; see `max_pool_with_places`."""

pad: Callable[..., Tensor] = _KERNELS.pad
"""The name by which parts of torch call `torch.nn.functional.pad`; it would have no rule."""

_UPSAMPLING = {
    "nearest": ("upsample_nearest{}d",),
    "nearest-exact": ("_upsample_nearest_exact{}d",),
    "linear": ("upsample_linear1d",),
    "bilinear": ("upsample_bilinear2d", "_upsample_bilinear2d_aa"),
    "trilinear": ("upsample_trilinear3d",),
    "bicubic": ("upsample_bicubic2d", "_upsample_bicubic2d_aa"),
}


def upsampling(mode: str, antialias: bool, spatial: int) -> Callable[..., Tensor]:
    """Return the kernel of `torch.nn.functional.interpolate` for a mode and spatial dimensions. It
    takes sizes and scales both, which a block needs: its scale is the scale of the whole."""
    kernel: Callable[..., Tensor] = getattr(_KERNELS, _UPSAMPLING[mode][antialias].format(spatial))
    return kernel


assert_async: Callable[..., None] = torch._assert_async
"""Raise where the only element is 0, on a GPU when it comes to it; else each check would wait."""

unscale_gradients: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiply gradients in place, and note what is not finite. GradScaler would have no rule."""

norms: Callable[..., Any] = torch._foreach_norm
"""Return the norm of each tensor. torch's clipping of gradients would have no rule."""


def of_lists(name: str) -> Callable[..., Any]:
    """Return the function of lists of tensors for a function, "add_" say. Optimizers of torch, and
    averages of weights, would have no rule."""
    function: Callable[..., Any] = getattr(torch, f"_foreach_{name}")
    return function


def fused_step(optimizer: str) -> Callable[..., Any]:
    """Return the step of a fused optimizer, "adam" say, which would have no rule."""
    function: Callable[..., Any] = getattr(torch, f"_fused_{optimizer}_")
    return function


make_dual: Callable[..., Any] = torch._C._VariableFunctions._make_dual
"""Make a tensor with a tangent. torch's forward mode would be refused without saying a way out."""

compatible_types: Callable[..., bool] = torch._has_compatible_shallow_copy_type
"""Return whether `.data` of a tensor can become another one. `module.to` of a parallelized module
would be refused without saying a way out."""

reduction_of_flags: Callable[..., str] = _reduction.legacy_get_string
"""Return the reduction of a loss for torch's deprecated `size_average` and `reduce`."""

unpooled_size: Callable[..., Any] = F._unpool_output_size  # type: ignore[attr-defined]
"""Return the plane that maximum unpooling makes, with torch's checks of `output_size`."""

fans: Callable[[Tensor], tuple[int, int]] = nn.init._calculate_fan_in_and_fan_out
"""Return the inputs and outputs of an element of a weight, from its global shape; torch's
`kaiming_uniform_` would see those of a block."""


def only_raises(function: Callable[..., Any]) -> bool:
    """Return whether a function of linear algebra is kept for the sake of its error message; from
    torch 2.13 on some are. Their rules would compute what serial torch does not."""
    return function.__module__ == "torch._linalg_utils"


def dropped_weight(loss: Callable[..., Any]) -> Any:
    """Return the weight with which the caller has called `loss`, a function of
    torch.nn.functional, or None.

    `l1_loss` of torch 2.6 to 2.15 does not hand its weight on to a subclass. The loss would be
    computed without it, so it is read from the frame of torch's own function.
    """
    frame: Any = sys._getframe(1)
    for _ in range(8):
        if frame is None or frame.f_code is loss.__code__:
            break
        frame = frame.f_back
    else:
        return None
    return None if frame is None else frame.f_locals.get("weight")


def composition(function: Any) -> Callable[..., Any]:
    """Return a function of torch, which is written in Python, without its own dispatch.

    `multi_head_attention_forward` is handed over as a whole to a subclass; run by this, each
    function that it calls is. Else distconv would hold a copy of torch's 300 lines.
    """
    names = {**function.__globals__, "has_torch_function": lambda *_: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# Modules

BatchNorm: Any = _BatchNorm
"""The base of torch's batch norms, also of other packages'. Planning would ask for the value of
their counters, which have none there."""

CODE_OF_MODULE_CALL: CodeType = nn.Module._call_impl.__code__
"""The code that runs a module. Messages, plans and timelines would not name the layer they are
from: the frames of this code are looked for on the stack, so that nothing is noted in each call."""


def parts_and_parameters(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tables of a module's own parameters and parts. Whether a module is what it was
    would take as long to find as torch takes to go through all of it."""
    return module._parameters, module._modules


def hooks_of_module(module: nn.Module) -> tuple[Any, Any]:
    """Return the tables of hooks before and after `forward`. Copies of a parallelized module keep
    hooks, whose handles only the original has, and could not be made ordinary."""
    return module._forward_pre_hooks, module._forward_hooks


def versions_in_state(state: Mapping[str, Any]) -> Any:
    """Return what `state_dict()` says of the versions of modules, or None. States of earlier torch
    versions would be read wrongly."""
    return getattr(state, "_metadata", None)


def set_versions_in_state(state: Any, versions: Any) -> None:
    """Set what `versions_in_state` returns."""
    state._metadata = versions


def in_data_parallel() -> bool:
    """Return whether the forward pass of a DistributedDataParallel is under way. It would divide
    the gradients of a parallelized part by the number of ranks."""
    return DistributedDataParallel._active_ddp_module is not None


def is_flat_parameter(x: Tensor) -> bool:
    """Return whether FSDP has made a parameter of several. Its gradient would be added up twice."""
    return hasattr(x, "_is_flat_param")


# torch.distributed, which is imported where it is used


def gather_flat(group: Any) -> Callable[..., Any]:
    """Return the all-gather of a process group into one tensor. The public one takes default groups
    only, and distconv makes groups of its own."""
    gather: Callable[..., Any] = group._allgather_base
    return gather


def start_batch(group: Any, device: torch.device) -> None:
    """Begin a batch of messages between accelerators. Two ranks that send to each other would wait
    for ever."""
    group._start_coalescing(device)


def end_batch(group: Any, device: torch.device) -> Any:
    """Start the batch of messages, and return its request; see `start_batch`."""
    return group._end_coalescing(device)


def set_limit(options: Any, limit: Any) -> None:
    """Set how long a group between accelerators waits; torch would end a job after 10 minutes of
    its own."""
    options._timeout = limit


def end_group(group: Any, abort: bool) -> None:
    """End a group between accelerators, at once or when its work is done. Its threads would outlive
    the interpreter. The names have no underscore since torch 2.7."""
    name = "abort" if abort else "shutdown"
    end = getattr(group, name, None) or getattr(group, f"_{name}", None)
    if end is not None:
        end()


def default_store() -> Any:
    """Return the store of torch.distributed's default group. Ranks that a program has joined by
    `init_process_group` would not find each other."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
