"""A user's own torch.autograd.Function on DistTensors.

torch would record such a Function on the DistTensors, but distconv's autograd graph connects their
shards. So `apply` records the Function on the shards. The user's forward and backward run on
DistTensors, unchanged, and are exact by the rules of the functions that they call.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import CheckpointFunction

from distconv.geometry.layout import Cuts, Shape
from distconv.grid.interface import Grid
from distconv.ops.support.operands import as_distributed, common_grid, shard_of
from distconv.tensor.base import DistTensorBase
from distconv.tensor.dispatch import refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.recording import ADVICE_FOR_FUNCTIONS, gradient_part, recorded, whole_gradient
from distconv.torch_private import (
    BackwardHookFunction,
    apply_of_torch,
    at_first_grid,
    keeps_inputs,
    replace_apply,
    replace_saved_inputs,
    run_eagerly,
)


class _BlockPlace(NamedTuple):
    """The global shape, cuts and grid by which a saved shard is turned back into its DistTensor.

    `cuts` are the grid axes that partition each dimension. `distributed` is False for a plain
    tensor, which is its own shard.
    """

    shape: Shape
    cuts: Cuts
    grid: Grid
    distributed: bool

    @classmethod
    def of(cls, x: Tensor, grid: Grid) -> _BlockPlace:
        distributed = isinstance(x, DistTensorBase)
        cuts = x.cuts if isinstance(x, DistTensorBase) else ((),) * x.dim()
        return cls(tuple(x.shape), cuts, grid, distributed)

    def tensor(self, shard: Tensor) -> Tensor:
        """Return the DistTensor whose shard on this rank is `shard`, or a plain `shard` itself."""
        return DistTensor(shard, self.shape, self.cuts, self.grid) if self.distributed else shard

    def gradient(self, part: Tensor) -> Tensor:
        """Return a tensor's gradient: the sum of `part` over the tensor's replicas. Collective."""
        return self.tensor(whole_gradient(part, self.cuts, self.grid))


class _Context(FunctionCtx):
    """The `ctx` that a user's Function receives, with torch's methods and the user's attributes.

    Gradients of unused outputs are zeros on all ranks, also after `set_materialize_grads(False)`.
    """

    to_save: tuple[Any, ...] = ()
    non_differentiable: tuple[Tensor, ...] = ()
    dirty_tensors: tuple[Tensor, ...] = ()
    saved_tensors: tuple[Tensor | None, ...] = ()
    gradient_types: tuple[torch.dtype | None, ...] | None = None

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad

    @property
    def saved_variables(self) -> tuple[Tensor | None, ...]:
        """Return `saved_tensors`, under torch's old name."""
        return self.saved_tensors

    def set_output_grad_dtype(self, *types: torch.dtype | None) -> None:
        """Set the type in which `backward` gets the gradient of each output; from torch 2.14 on."""
        self.gradient_types = types


class _FunctionCall:
    """A call of a user's Function, which the autograd graph keeps for the backward pass."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], grid: Grid) -> None:
        self.function, self._arguments, self._grid = function, arguments, grid
        self._inputs = [
            _BlockPlace.of(x, grid) if isinstance(x, Tensor) else None for x in arguments
        ]
        self._context = _Context(
            tuple(isinstance(x, Tensor) and x.requires_grad for x in arguments)
        )
        self._saved: list[_BlockPlace | None] = []
        self._outputs: list[_BlockPlace | None] = []
        self._several = False

    def run(self) -> Any:
        """Return the Function's result, computed as one node of the graph that connects shards."""
        arguments, self._arguments = self._arguments, ()
        shards = [shard_of(x) for x in arguments if isinstance(x, Tensor)]
        results = _OnShards.apply(self, arguments, *shards)
        outputs = tuple(
            x if place is None else place.tensor(x)
            for x, place in zip(results, self._outputs, strict=True)
        )
        return outputs if self._several else outputs[0]

    def forward(self, node: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run the user's forward on `arguments`; return the shards of its outputs.

        Saved tensors and other settings of the user's `ctx` are copied to `node`, the node in the
        graph of the shards.
        """
        function, context, grid = self.function, self._context, self._grid
        if _has_setup_context(function):
            result = function.forward(*arguments)
            function.setup_context(context, arguments, result)
        else:
            result = function.forward(context, *arguments)
        self._several = isinstance(result, tuple)
        outputs = result if self._several else (result,)
        outputs = tuple(self._as_output(x, arguments) for x in outputs)
        self._check(outputs)
        self._outputs = [
            _BlockPlace.of(x, grid) if isinstance(x, DistTensorBase) else None for x in outputs
        ]
        self._saved = [None if x is None else _BlockPlace.of(x, grid) for x in context.to_save]
        node.save_for_backward(*map(shard_of, context.to_save))
        node.mark_non_differentiable(*map(shard_of, context.non_differentiable))
        if context.gradient_types is not None:
            node.set_output_grad_dtype(*context.gradient_types)
        context.to_save = context.non_differentiable = ()
        return tuple(map(shard_of, outputs))

    def _as_output(self, output: Any, arguments: tuple[Any, ...]) -> Any:
        """Return `output` of the user's forward; a plain argument that was written is distributed.

        An output that is one of the plain `arguments` becomes a DistTensor.
        """
        if isinstance(output, Tensor) and any(output is x for x in arguments):
            return as_distributed(output, self._grid)
        return output

    def _check(self, outputs: tuple[Any, ...]) -> None:
        """Raise UnsupportedOperation for inputs written in place and for plain outputs.

        The gradients would be wrong. A plain output may be marked as not differentiable.
        """
        name, context = self.function.__name__, self._context
        if context.dirty_tensors:
            reason = "it writes to its inputs in place"
            way_out = "Return a new tensor instead of marking an input as dirty"
            refuse(f"{name}.apply", reason, *context.dirty_tensors, way_out=way_out)
        marked = {id(x) for x in context.non_differentiable}
        for x in outputs:
            plain = isinstance(x, Tensor) and not isinstance(x, DistTensorBase)
            if plain and x.is_floating_point() and id(x) not in marked:
                refuse(
                    f"{name}.apply",
                    f"it computes a plain tensor, {tuple(x.shape)}, from distributed tensors",
                    way_out="Return a DistTensor, such as x.redistribute(Layout()), which is "
                    "whole on every rank, or mark the output by ctx.mark_non_differentiable",
                )

    def backward(self, node: Any, parts: tuple[Any, ...]) -> list[Tensor | None]:
        """Run the user's backward; return this rank's part of the gradient of each input tensor.

        `parts` are this rank's parts of the gradients of the outputs. The sum of the parts over all
        ranks with the same block is the gradient.
        """
        context, name = self._context, f"{self.function.__name__}.backward"
        context.saved_tensors = tuple(
            x if place is None else place.tensor(x)
            for x, place in zip(node.saved_tensors, self._saved, strict=True)
        )
        gradients: list[Any] = [
            part if place is None else place.gradient(part)
            for part, place in zip(parts, self._outputs, strict=True)
        ]
        try:
            result = self._gradients(node, gradients)
        finally:
            context.saved_tensors = ()
        returned = result if isinstance(result, tuple) else (result,)
        expected = len(self._inputs)
        if len(returned) < expected or any(x is not None for x in returned[expected:]):
            raise RuntimeError(
                f"{name} returned {len(returned)} gradients; expected {expected}, one for each "
                "input of forward"
            )
        return [
            None
            if gradient is None or not needed
            else gradient_part(gradient, place.shape, place.cuts, place.grid, name)
            for gradient, place, needed in zip(
                returned, self._inputs, context.needs_input_grad, strict=False
            )
            if place is not None
        ]

    def _gradients(self, node: Any, gradients: list[Any]) -> Any:
        """Run the user's backward on the gradients of the outputs, and return its result."""
        function = self.function
        if hasattr(Function, "boxed_grads_call") and function.boxed_grads_call:
            gradients = [gradients]  # one list, not one argument for each
        overridden = function.vjp is not Function.vjp
        return (function.vjp if overridden else function.backward)(self._context, *gradients)


class _ModuleHooks(_FunctionCall):
    """A call of torch's Function that runs full backward hooks of a module.

    torch applies this Function to the module's inputs or outputs. The Function returns its inputs
    unchanged. The hooks get and return serial gradients. Gradients of unused outputs are zeros,
    although serial torch has None.
    """

    def _as_output(self, output: Any, arguments: tuple[Any, ...]) -> Any:
        """Return `output` unchanged: it is one of the inputs, which may be plain."""
        return output

    def _check(self, outputs: tuple[Any, ...]) -> None:
        """Do nothing: the outputs are the inputs, which may be plain."""

    def forward(self, node: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        node.serial_hooks = []
        shards = super().forward(node, arguments)
        self._outputs = self._inputs
        return shards

    def _gradients(self, node: Any, gradients: list[Any]) -> tuple[Any, ...]:
        passed = tuple(gradients)
        for hook in node.serial_hooks:
            changed = hook(passed, tuple(gradients))
            passed = passed if changed is None else tuple(changed)
        return passed


class _OnShards(Function):
    """The torch Function that makes a user's Function a single node of the graph of the shards."""

    @staticmethod
    def forward(node: Any, call: _FunctionCall, arguments: tuple[Any, ...], *shards: Tensor) -> Any:
        node.call, node.function = call, call.function
        return call.forward(node, arguments)

    @staticmethod
    def backward(node: Any, *parts: Any) -> Any:
        return None, None, *node.call.backward(node, parts)


def _has_setup_context(function: Any) -> bool:
    """Return whether a Function has a `setup_context`, so that its forward does not get a ctx."""
    return function.setup_context is not Function.setup_context


def _by_position(
    function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments of `apply` as positional arguments of the Function's forward.

    Defaults are filled in for a Function with `setup_context`. Without `setup_context`, a keyword
    argument is supported only if no argument before it is missing. Otherwise raises TypeError, as
    torch does.
    """
    newer = _has_setup_context(function)
    if not keywords and not newer:
        return arguments
    context = () if newer else (None,)
    name = f"{function.__name__}.apply"
    try:
        bound = signature(function.forward).bind(*context, *arguments, **keywords)
    except TypeError as error:
        raise TypeError(f"{name}, arguments of forward: {error}") from None
    if newer:
        bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(
            f"{name}: torch passes the arguments of forward by position, but "
            f"{', '.join(bound.kwargs)} has no position: an earlier argument is left out, or "
            "forward accepts it by name only. Pass all earlier arguments"
        )
    return bound.args[len(context) :]


@run_eagerly
def _apply(cls: Any, *arguments: Any, **keywords: Any) -> Any:
    """Replace torch's `Function.apply`: run a call that autograd records on the shards. Collective.

    torch runs a call without DistTensors, or outside autograd. Gradients are exact if the
    Function's backward is. Raises UnsupportedOperation for Functions that torch itself defines.
    """
    everything = (*arguments, *keywords.values()) if keywords else arguments
    if not any(isinstance(x, DistTensor) for x in everything):
        return apply_of_torch(cls)(*arguments, **keywords)
    tensors = [x for x in everything if isinstance(x, Tensor)]
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
        return apply_of_torch(cls)(*arguments, **keywords)
    name = f"{cls.__name__}.apply"
    if keeps_inputs(cls):
        return apply_of_torch(cls)(*arguments, **keywords)
    if cls not in (CheckpointFunction, BackwardHookFunction) and _of_torch(cls):
        reason = "this torch.autograd.Function of torch was applied to a distributed tensor"
        refuse(name, reason, *tensors, way_out=ADVICE_FOR_FUNCTIONS)
    grid = common_grid(name, tensors)
    # Ranks compare plain arguments where these are combined with distributed ones.
    given = recorded(name, _by_position(cls, arguments, keywords), compared=False)
    kind = _ModuleHooks if cls is BackwardHookFunction else _FunctionCall
    return kind(cls, tuple(given), grid).run()


def _of_torch(function: Any) -> bool:
    """Return whether a Function is torch's own, except those of torch.distributions.

    The Functions of torch.distributions are supported, as they call torch functions.
    """
    module = f"{function.__module__}."
    return module.startswith("torch.") and not module.startswith("torch.distributions.")


def _saved(inputs: tuple[Any, ...]) -> tuple[list[Any], list[_BlockPlace | None]]:
    """Return a checkpoint's inputs with shards in place of DistTensors, and their places.

    torch.utils.checkpoint saves the first list. The second has the shape and layout of each
    DistTensor, and None for every other input. Collective if the elements of an input are not in
    its blocks yet.
    """
    places = []
    for x in inputs:
        if isinstance(x, DistTensorBase):
            x.materialize()  # the function gets the same values in both runs
        places.append(_BlockPlace.of(x, x.grid) if isinstance(x, DistTensorBase) else None)
    return [shard_of(x) for x in inputs], places


def _restored(shards: list[Any], places: list[_BlockPlace | None]) -> list[Any]:
    """Return a checkpoint's inputs, with DistTensors made of the saved shards and places."""
    pairs = zip(shards, places, strict=True)
    return [x if place is None else place.tensor(x) for x, place in pairs]


at_first_grid(partial(replace_apply, _apply))
at_first_grid(partial(replace_saved_inputs, _saved, _restored))
