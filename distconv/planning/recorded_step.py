"""`record_step`: record a training step of one rank of a grid by a dry run.

The module is parallelized as in a program, so that its layouts, sharded weights and reductions of
gradients are those of `parallelize` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as _checkpoint

from distconv.comm.ledger import trace_movements, without_counting
from distconv.device.kinds import rehearsed
from distconv.geometry.layout import Layout
from distconv.model.parallelize import no_sync, parallelize
from distconv.planning.dry_run import DryRunGrid, without_elements
from distconv.planning.recorder import Recorder, RuleCalls
from distconv.planning.recording import LayerPlan, Place, Recording
from distconv.tensor.base import shards_of, tensors_in
from distconv.tensor.dispatch import UnsupportedOperation

LossFunction: TypeAlias = Callable[[Any], Tensor]
"""A function from the module's result to the scalar loss."""

OptimizerFactory: TypeAlias = Callable[[Any], torch.optim.Optimizer]


def mean_square(output: Any) -> Tensor:
    """Return the sum of the mean squared errors between a module's results and zeros."""
    return _sum_of_losses(output, lambda y: F.mse_loss(y, torch.zeros_like(y)))


def cross_entropy(output: Any) -> Tensor:
    """Return the sum of the cross entropies of a module's results, with class 0 as every label.

    Each result has logits (samples, classes, ...).
    """
    return _sum_of_losses(
        output, lambda y: F.cross_entropy(y, torch.zeros_like(y.detach()[:, 0], dtype=torch.int64))
    )


def _sum_of_losses(output: Any, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the sum of `loss` over all floating-point tensors in the result of a module.

    Raises TypeError if there are none.
    """
    if is_dataclass(output) and not isinstance(output, dict):
        output = [getattr(output, field.name) for field in fields(output)]
    losses = [loss(y) for y in tensors_in(output) if y.is_floating_point()]
    if not losses:
        raise TypeError("the result has no floating-point tensor to minimize; pass a loss function")
    return sum(losses[1:], losses[0])


LOSSES: dict[str, LossFunction] = {"mse": mean_square, "cross-entropy": cross_entropy}

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


def record_step(
    module: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    extents: Mapping[str, int],
    *,
    rank: int | None = None,
    layouts: Mapping[str, Layout] | None = None,
    layout: Layout | Sequence[Layout | None] | None = None,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    loss: LossFunction | str | None = "mse",
    optimizer: OptimizerFactory | str = "sgd",
    autocast: torch.dtype | None = None,
    checkpoint: str | Sequence[str] = (),
    accumulate: int = 1,
    offload: bool = False,
    input_gradients: bool = False,
    gpu: bool = False,
    serial: bool = False,
    caller: str = "record_step",
    progress: Callable[[LayerPlan], object] = lambda layer: None,
    **options: Any,
) -> Recording:
    """Record a training step on one rank of a grid, without communication or arithmetic.

    Raises UnsupportedOperation if the module cannot run on the grid. Raises RuntimeError, naming
    the layer, if the step raises, also because it reads the elements of a tensor. Raises ValueError
    for a module that is parallelized, or has parameters without a shape.

    Parameters
    ----------
    module: the module, not parallelized; `layouts` and `options` are passed to `parallelize`.
    shapes: the global shape of each input.
    extents: the ranks along the axes of the grid.
    rank: the recorded rank; by default the one in the middle of every axis.
    layout: the layout of the inputs, or one for each; by default every dimension is partitioned
        over the axis of its own name.
    dtype: the type of the inputs, or one for each; the first parameter's by default.
    loss: a function of the module's result, or a name in `LOSSES`; with None the forward pass alone
        is recorded, up to the first unsupported layer.
    optimizer: a function that makes an optimizer of parameters, or a name in `OPTIMIZERS`.
    autocast: the type of `torch.autocast` around the module and the loss; None without it.
    checkpoint: the modules that are recomputed in the backward pass; see `with_checkpoints`.
    accumulate: the number of mini-batches of the given shapes in a step. All but the last run
        within `no_sync`.
    offload: whether GPUs keep saved activations on the host, as by `save_on_cpu`. The time of their
        copies is not recorded.
    input_gradients: whether the inputs require gradients, too.
    gpu: whether the ranks compute on GPUs, where the library runs other code for some operators.
    serial: whether the plain module runs on plain tensors, as in the serial program.
    caller: the name of the calling function for errors.
    progress: called with each layer of the forward pass as it is reached.
    """
    minimised = _named(loss, LOSSES, "loss")
    make_optimizer = _named(optimizer, OPTIMIZERS, "optimizer")
    dtypes = _each_input(dtype or dtype_of(module), len(shapes), f"{caller}: dtype")
    cuts = _each_input(layout, len(shapes), f"{caller}: layout")
    _check_options(accumulate, offload, gpu, caller)
    grid = DryRunGrid(extents, rank, gpu=gpu)
    hollow = with_checkpoints(without_elements(module, caller), checkpoint)
    recorder = Recorder(hollow, grid, progress)
    if not serial:
        with grid.all_alike():
            parallelize(hollow, grid, layouts=layouts, **options)  # type: ignore[arg-type]
    recorder.memory.hold((*shards_of(hollow.parameters()), *hollow.buffers()), "parameters")
    inputs = _inputs(grid, zip(shapes, cuts, dtypes, strict=True), serial)
    recorder.memory.hold(shards_of(inputs), "other")
    for x in inputs:
        x.requires_grad_(input_gradients)
    made = None if minimised is None else _optimizer(make_optimizer, hollow, recorder)
    try:
        with (
            _errors_name_the_layer(recorder, caller),
            torch.random.fork_rng(devices=[]),
            without_counting(),
            recorder,
            RuleCalls(recorder),
            autocast_of(rehearsed() if gpu else "cpu", autocast),
        ):
            if minimised is None:
                _run(hollow, inputs, None, recorder, offload)
            else:
                for _ in range(accumulate - 1):
                    with nullcontext() if serial else no_sync(hollow):
                        _run(hollow, inputs, minimised, recorder, offload)
                    recorder.repeat()
                _run(hollow, inputs, minimised, recorder, offload)
                recorder.move(Place("optimizer", "optimizer"))
                if made is not None:
                    made.step()
    except UnsupportedOperation as refusal:
        if minimised is not None:
            raise
        recorder.refuse(str(refusal))
    finally:
        recorder.remove()
    return recorder.recording()


def _check_options(accumulate: int, offload: bool, gpu: bool, caller: str) -> None:
    """Raise ValueError if `accumulate` is not 1 or more, or `offload` is true without `gpu`."""
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(
            f"{caller}: accumulate={accumulate!r}; expected a number of mini-batches, 1 or more"
        )
    if offload and not gpu:
        raise ValueError(
            f"{caller}: offload=True, but the ranks compute on CPUs, whose activations are in the "
            "memory of the host already; leave it out, or choose a machine with GPUs"
        )


def _inputs(grid: DryRunGrid, given: Iterable[Any], serial: bool) -> list[Tensor]:
    """Return an input without elements for each shape, layout and type; plain if `serial`."""
    if serial:
        return [torch.empty(shape, dtype=dtype, device="meta") for shape, _, dtype in given]
    return [grid.tensor(*each) for each in given]


def _optimizer(
    make: OptimizerFactory, module: nn.Module, recorder: Recorder
) -> torch.optim.Optimizer | None:
    """Return the optimizer of a module's parameters, None without any; record its state."""
    parameters = list(module.parameters())
    made = make(parameters) if parameters else None
    state = [] if made is None else _make_state(made, parameters)
    recorder.memory.hold([x for x in state if x.is_meta], "optimizer state")
    recorder.watch_gradients(shards_of(parameters))
    return made


def _run(
    module: nn.Module,
    inputs: Sequence[Tensor],
    loss: LossFunction | None,
    recorder: Recorder,
    offload: bool,
) -> None:
    """Run the forward and backward pass of a mini-batch; only the forward pass without `loss`."""
    hooks = (recorder.offload, lambda make: make()) if offload else (recorder.keep, lambda x: x)
    with (
        trace_movements(recorder.movements),
        saved_tensors_hooks(*hooks),
        torch.device("meta"),  # for tensors that a module creates without naming a device
    ):
        output = module(*inputs)
        if loss is None:
            return
        recorder.move(Place("loss", "forward"))
        scalar = loss(output)
        del output
    recorder.turn()
    if scalar.requires_grad:
        scalar.backward()
    del scalar


@contextmanager
def _errors_name_the_layer(recorder: Recorder, caller: str) -> Iterator[None]:
    """Raise a RuntimeError that names the layer and `caller` for any error in a `with` block.

    `UnsupportedOperation` is raised unchanged.
    """
    try:
        yield
    except UnsupportedOperation:
        raise
    except Exception as error:
        name, part = recorder.where
        raise RuntimeError(
            f"{caller}: {name} ({type(part).__name__}) raised {type(error).__name__}: {error}"
            + (_NO_ELEMENTS if "meta" in str(error) else "")
        ) from error


_NO_ELEMENTS = (
    ". Plans use shapes without values: a module that depends on values, for example by .item(), "
    "can be verified, but not explained or predicted"
)


@contextmanager
def autocast_of(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Turn on autocast to `dtype` in a `with` block, for a device type that may be absent here.

    torch has no autocast for meta tensors, so autocast is turned on for `device`, on which the
    ranks of the grid compute. The block includes the backward pass, in which autocast affects only
    layers that a checkpoint recomputes. With `dtype` None nothing changes.
    """
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    if dtype is not None:
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def with_checkpoints(module: nn.Module, chosen: str | Sequence[str]) -> nn.Module:
    """Let modules recompute their activations by `torch.utils.checkpoint`; return `module`.

    `chosen` has names of classes, such as "ResBlock", and shell patterns of module names, such as
    "encoder.*". Modules within a chosen module are recomputed with it. "blocks" selects the modules
    at the first level of nesting that has three or more, or none without such a level. Raises
    ValueError for a name or pattern that matches no module.
    """
    patterns = [chosen] if isinstance(chosen, str) else list(chosen)
    found: set[nn.Module] = set()
    named = dict(module.named_modules())
    for pattern in patterns:
        if pattern == BLOCKS:
            level = [module]
            while 0 < len(level) < 3:
                level = [child for part in level for child in part.children()]
            found |= set(level)
            continue
        matching = {
            part
            for name, part in named.items()
            if name and (type(part).__name__ == pattern or fnmatchcase(name, pattern))
        }
        if not matching:
            kinds = dict.fromkeys(type(part).__name__ for name, part in named.items() if name)
            raise ValueError(
                f"checkpoint={pattern!r} is not the class or name of a module; choose {BLOCKS}, "
                f"or one of {', '.join(kinds)}"
            )
        found |= matching
    inner = {part for each in found for part in each.modules() if part is not each}
    for part in found - inner:
        part.forward = partial(_checkpoint, part.forward, use_reentrant=False)  # type: ignore[method-assign]
    return module


BLOCKS = "blocks"
"""The name in `with_checkpoints` that selects the blocks of a module."""


def shapes_of(given: Any) -> list[tuple[int, ...]]:
    """Return a list of shapes, one for each input, from such a list or a single shape.

    Raises ValueError for anything else.
    """
    several = list(given) if given and all(isinstance(s, Sequence) for s in given) else [given]
    shapes = [tuple(shape) for shape in several]
    for shape in shapes:
        if not shape or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(f"{shape} is not a shape; write (1, 18, 256, 256), for example")
    return shapes


def _named(given: Any, known: Mapping[str, Any], what: str) -> Any:
    """Return the entry of `known` with the name `given`; anything but a string is returned as is.

    `what` is the name of the argument for error messages. Raises ValueError for an unknown name.
    """
    if not isinstance(given, str):
        return given
    if given not in known:
        raise ValueError(f"{what}={given!r} is unknown; choose from {', '.join(known)}")
    return known[given]


def _each_input(value: Any, count: int, what: str) -> list[Any]:
    """Return a list with a value for each of `count` inputs, from a list or a single value.

    `what` is the name of the argument for the ValueError that a list of another length raises.
    """
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{what} has {len(value)} entries for {count} inputs")
    return list(value)


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the type of a module's first floating-point parameter, or torch's default."""
    floating = (p.dtype for p in module.parameters() if p.is_floating_point())
    return next(floating, torch.get_default_dtype())


def _make_state(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Run a first step, in which an optimizer creates its state; return the state's tensors."""
    for p in parameters:
        p.grad = torch.empty_like(p) if p.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    tensors = [x for each in optimizer.state.values() for x in each.values() if torch.is_tensor(x)]
    return shards_of(tensors)
