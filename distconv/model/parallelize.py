"""`parallelize`: a whole model on a grid, with equal parameters on all ranks.

Every rank holds all parameters, and computes its part of their gradients; the gradient is the sum
of the parts (see `gradient_reduction`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from distconv.comm.collectives import broadcast, wire_type
from distconv.device import kinds
from distconv.geometry.layout import Layout
from distconv.grid.process_grid import ProcessGrid
from distconv.grid.words import differences
from distconv.model.gradient_reduction import (
    REDUCTION_ATTRIBUTE,
    GradientReduction,
    reduction_of,
    required_reduction,
)
from distconv.model.layouts import (
    InputLayout,
    make_whole,
    match_layouts,
    redistribute_inputs,
    shard_weights,
)
from distconv.model.module_guard import (
    ModuleGuard,
    check_unwrapped,
    refuse_fully_shard,
    refuse_wrappers_around,
)
from distconv.model.sample_shards import (
    SHARDS,
    GatheredWeights,
    gather_in_calls,
    shard_over_samples,
)
from distconv.tensor.dispatch import ADVICE_SERIAL, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.ownership import disown, is_owned
from distconv.tensor.recording import check_untraced
from distconv.tensor.redistribution import check_grid
from distconv.torch_private import hooks_of_module

Module = TypeVar("Module", bound=nn.Module)

_SCRIPT = "__prepare_scriptable__"
"""The attribute of a module that torch.jit.script calls first."""

_HOOKS = ModuleGuard, InputLayout, GatheredWeights
"""The classes of the forward hooks that `parallelize` puts on modules."""

_WITHOUT_SHAPE = "without shape yet"


def parallelize(
    module: Module,
    grid: ProcessGrid,
    *,
    layouts: Mapping[str, Layout] | None = None,
    shard_parameters: bool = False,
    shard: str | None = None,
    bucket_bytes: int = 2**20,
    wire: str | None = None,
    error_feedback: bool = False,
) -> Module:
    """Make `module` compute on DistTensors of `grid` with the serial program's results; return it.

    Parameters and buffers become those of rank 0, on the grid's device, and keep their memory
    format. From then on, when `backward()` returns, the gradients of the parameters are the serial
    program's on every rank. A parameter that takes no part in a backward pass keeps its earlier
    gradient, or None. Hooks on parameters that are registered before the forward pass get these
    gradients, too. The state_dict stays that of the plain module.

    All ranks of the grid call it together, and run the same forward and backward passes.

    Parameters
    ----------
    module: any torch.nn.Module; its inputs are then DistTensors.
    layouts: for shell patterns of module names, such as "block5.*" ("" is the module itself), the
        layout of these modules' inputs; the last pattern that matches decides. A tensor with
        another layout is redistributed, once for all modules that take it in the same layout. Other
        modules do not change the layout of their inputs.
    shard_parameters: whether every rank keeps only its blocks of the weights of convolutions and
        fully connected layers whose layout partitions channels. They become DistTensors; an
        optimizer made before this call stays valid if it has no state yet. Weights that are
        parametrized are not sharded.
    shard: "zero3" or "zero2" to shard all other weights over the samples, with their gradients and
        their optimizer state. A module gathers its weights while it is called. With "zero3" the
        backward pass gathers the weights again; with "zero2" the gathered weights are kept until
        the backward pass. All ranks must call each module together, also without gradients.
    bucket_bytes: the bytes of gradients in one message.
    wire: "bfloat16" or "float16" to send gradients in half precision, and sum them in float32.
        Gradients then equal the serial ones within two roundings to this type, and are sent after
        the backward pass. float16 has more bits of mantissa, and is infinite beyond 65504. Weights
        of `shard` are summed over the samples in their own type.
    error_feedback: whether a rank keeps the rounding errors of `wire`, and adds the errors to the
        gradients of the next step. This takes the memory of one gradient, which is not part of any
        checkpoint.

    Raises
    ------
    TypeError
        If `module` is no Module, or is wrapped by torch's data parallelism or sharding. Wrapping it
        afterwards raises the same error.
    ValueError
        On every rank, if the ranks' modules differ in the names, shapes, types or strides of their
        parameters and buffers, if some of these have no shape yet, if the module is parallelized
        already, if a pattern matches nothing, if `bucket_bytes` is below 1, if `wire` or `shard` is
        another text, if `error_feedback` is given without `wire`, or if torch's settings of TF32,
        cuDNN, oneDNN or deterministic algorithms differ between ranks.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> model = dc.parallelize(nn.Conv2d(1, 1, 3, padding=1, bias=False), grid)
    >>> x = dc.distribute_tensor(torch.ones(1, 1, 8, 8), grid)
    >>> model(x).sum().backward()  # the gradient of the serial program, on every rank
    >>> model.weight.grad[0, 0]
    tensor([[49., 56., 49.],
            [56., 64., 56.],
            [49., 56., 49.]])
    """
    _check_module(module, grid)
    options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "shard_parameters": shard_parameters}
    options |= {"grid": str(grid), "layouts": layouts, "wire": wire, "shard": shard}
    options["error_feedback"] = error_feedback
    _compare(options | kinds.settings(), grid, "pass the same on every rank")
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(
            f"parallelize: bucket_bytes={bucket_bytes!r} is not a size; expected 1 byte or more"
        )
    if shard not in (None, *SHARDS):
        raise ValueError(f"parallelize: shard={shard!r}; expected one of {', '.join(SHARDS)}")
    half = None if wire is None else wire_type("parallelize", wire)
    if error_feedback and half is None:
        raise ValueError(
            "parallelize: error_feedback=True requires a 16-bit type; choose it by wire="
        )
    chosen = match_layouts(module, layouts or {})
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    _compare_modules(state, grid)
    if any(tensor.device != grid.device for tensor in state.values()):
        module.to(grid.device)
    for tensor in (*module.parameters(), *module.buffers()):
        broadcast(tensor, grid)
    if shard_parameters:
        shard_weights(module, chosen, grid)
    over_samples = set() if shard is None else shard_over_samples(module, grid)
    redistribute_inputs(module, chosen)
    reduction = GradientReduction(module, grid, bucket_bytes, half, error_feedback)
    ModuleGuard(module, reduction)
    gather_in_calls(module, over_samples, shard == "zero3")
    for part in module.modules():
        part.__dict__[REDUCTION_ATTRIBUTE] = reduction
        part.__dict__[_SCRIPT] = _refuse_script
    return module


def _check_module(module: Module, grid: ProcessGrid) -> None:
    """Raise TypeError or ValueError if `module` cannot be parallelized on `grid`, or is already.

    Removes the hooks of an earlier `parallelize` from a copy of a parallelized module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"parallelize: {type(module).__name__} is not a torch.nn.Module")
    check_untraced("parallelize")
    check_grid(grid)
    check_unwrapped(module)
    refuse_wrappers_around(reduction_of)
    refuse_fully_shard(reduction_of)
    if any(map(reduction_of, module.modules())):
        raise ValueError(
            "parallelize: the module, or a part of it, is already parallelized; after a change of "
            "its structure call parallelize(distconv.unparallelize(module), grid)"
        )
    unparallelize(module)
    if any(map(is_owned, module.parameters())):
        raise ValueError(
            "parallelize: the module shares parameters with a module that is already "
            "parallelized; parallelize both together, for example in a torch.nn.ModuleList"
        )


def _refuse_script() -> NoReturn:
    refuse("torch.jit.script", "the module is parallelized", way_out=ADVICE_SERIAL)


def unparallelize(module: Module) -> Module:
    """Make a parallelized module, or a copy of one, an ordinary module again, and return it.

    The program may then change its structure, and `parallelize` it again, on any grid. Parameters
    stay the same objects with the same values and gradients. Sharded parameters become plain global
    tensors, while their optimizer state stays sharded. All ranks of the grid call it together,
    outside of `no_sync`. An ordinary module is left unchanged.

    Raises
    ------
    ValueError
        Where the module is a part of a larger one, which was parallelized as a whole.
    RuntimeError
        If gradients have not been summed over the ranks yet, after `no_sync`.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> model = dc.parallelize(nn.Sequential(nn.Conv2d(1, 4, 3)), grid)
    >>> model = dc.unparallelize(model)
    >>> model.append(nn.ReLU())
    Sequential(
      (0): Conv2d(1, 4, kernel_size=(3, 3), stride=(1, 1))
      (1): ReLU()
    )
    >>> model = dc.parallelize(model, grid)
    """
    parts = list(module.modules())
    found = {part: part.__dict__.get(REDUCTION_ATTRIBUTE) for part in parts}
    # A copy holds the reduction of the original, which must stay as it is.
    own = {
        r for part, r in found.items() if r is not None and (r.covers(part) or r.whole() is None)
    }
    if any(r.whole() not in (None, *parts) for r in own):
        raise ValueError(
            "unparallelize: the module is a submodule of a parallelized module; pass the module "
            "that was given to parallelize"
        )
    for reduction in own:
        reduction.release()
    for part in parts:
        part.__dict__.pop(REDUCTION_ATTRIBUTE, None)
        part.__dict__.pop(_SCRIPT, None)
        hooks: Any
        for hooks in hooks_of_module(part):
            for number, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", hook), _HOOKS):
                    del hooks[number]
    disown(module.buffers())
    for p in module.parameters():
        if isinstance(p, DistTensor):
            make_whole(p)
    return module


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Keep each rank's part of the gradients on that rank within the context, without a sum.

    The next backward pass outside sums all parts: accumulation over several mini-batches for the
    price of one reduction. A gradient that the program itself sets before that pass is summed, too.
    Until that pass, gradients differ between ranks: a step of an optimizer would let their weights
    diverge, as with DistributedDataParallel. Run the last pass before a step outside the context,
    also if an epoch ends early.
    All ranks enter the context together. A `module` that is not parallelized raises `ValueError`.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> model = dc.parallelize(nn.Conv2d(1, 1, 1, bias=False), grid)
    >>> x = dc.distribute_tensor(torch.ones(1, 1, 4, 4), grid)
    >>> with dc.no_sync(model):
    ...     model(x).sum().backward()  # no all-reduce
    >>> model(x).sum().backward()  # sums both gradients over the ranks
    >>> model.weight.grad.item()
    32.0
    """
    reduction = required_reduction("no_sync", module)
    before, reduction.enabled = reduction.enabled, False
    try:
        yield
    finally:
        reduction.enabled = before


def _compare(mine: dict[str, Any], grid: ProcessGrid, way_out: str) -> list[dict[str, Any]]:
    """Return the values `mine` of all ranks; raise ValueError on every rank if they differ.

    `way_out` is advice for the error message. Collective.
    """
    everyone: list[dict[str, Any]] = grid.all_gather_object(mine)
    for found in differences(everyone):
        raise ValueError(f"parallelize: {found}; {way_out}")
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
    sparse = [n for n, t in state.items() if not is_lazy(t) and t.layout is not torch.strided]
    if sparse:
        raise ValueError(
            f"parallelize: sparse: {', '.join(sparse)}; keep such a matrix as a plain attribute of "
            "its module, the same on every rank, or make it dense"
        )
    lazy = [name for name, what in mine.items() if what == _WITHOUT_SHAPE]
    if lazy:
        raise ValueError(
            f"parallelize: without shape yet: {', '.join(lazy)}; first call the module on a small "
            "plain tensor"
        )
