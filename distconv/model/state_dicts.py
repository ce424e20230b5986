"""State_dicts of modules and optimizers in the serial program's format, the same for any grid."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from distconv import torch_private
from distconv.geometry.layout import operand_cuts
from distconv.ops.support.operands import box_on_rank
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import redistribute


def full_state_dict(source: nn.Module | Optimizer) -> dict[str, Any]:
    """Return the state_dict of the serial program, with global tensors, on every rank.

    Collective. Load the result serially with `load_state_dict`, or on any grid with
    `load_full_state_dict`. As in a state_dict, tensors that are not sharded are not copied.

    Examples
    --------
    >>> grid = dc.ProcessGrid(channel=2)
    >>> model = dc.parallelize(nn.Conv2d(4, 4, 3), grid, shard_parameters=True)
    >>> {name: tuple(value.shape) for name, value in dc.full_state_dict(model).items()}
    {'weight': (4, 4, 3, 3), 'bias': (4,)}
    """
    state: dict[str, Any] = map_state(source.state_dict(), whole)
    return state


def load_full_state_dict(target: nn.Module | Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state_dict of the serial program, with global tensors, into a module or an optimizer.

    Every rank passes the same state and keeps its blocks; no communication. A DistTensor in the
    state must have the target's layout. Names and shapes that do not fit raise the errors of
    torch's `load_state_dict`, on every rank.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> torch.save(nn.Conv2d(1, 4, 3).state_dict(), f"serial{grid.rank}.pt")
    >>> model = dc.parallelize(nn.Conv2d(1, 4, 3), grid)
    >>> dc.load_full_state_dict(model, torch.load(f"serial{grid.rank}.pt"))
    """
    if isinstance(target, nn.Module):
        target.load_state_dict(state)
        return
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in target.param_groups for p in group["params"]]
    cut = dict(state["state"])
    # torch itself raises if the numbers of parameters differ.
    for number, parameter in zip(numbers, parameters, strict=False):
        if isinstance(parameter, DistTensor) and number in cut:
            cut[number] = map_state(cut[number], partial(_cut, parameter=parameter))
    target.load_state_dict({**state, "state": cut})


def whole(x: Any) -> Any:
    """Return the global tensor of a DistTensor, and other values unchanged. Collective."""
    if not isinstance(x, DistTensor):
        return x
    return redistribute(x, ((),) * x.dim(), "full_state_dict").shard.detach()


def _cut(x: Any, parameter: DistTensor) -> Any:
    """Return a plain tensor of an optimizer's state as a DistTensor partitioned like `parameter`.

    A dimension of another size than the parameter's is replicated. Other values, and tensors with
    another number of dimensions, are returned unchanged. No communication.
    """
    if not isinstance(x, Tensor) or isinstance(x, DistTensor) or x.dim() != parameter.dim():
        return x
    cuts = operand_cuts(tuple(x.shape), tuple(parameter.shape), parameter.cuts)
    grid = parameter.grid
    block = x[box_on_rank(x.shape, cuts, grid).slices].to(grid.device, copy=True)
    return DistTensor(block, x.shape, cuts, grid)


def plain(x: Any) -> Any:
    """Return a `torch.Tensor` that shares the memory of `x`, of a subclass such as Parameter.

    Other values, and tensors of subclasses with their own `__torch_dispatch__`, are returned
    unchanged.
    """
    if not isinstance(x, Tensor) or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return x
    with torch_private.without_torch_function():
        x = x.detach()  # which drops attributes; sparse tensors have no subclasses
        return x if type(x) is Tensor else x.as_subclass(Tensor)


def map_state(state: Any, function: Callable[[Any], Any]) -> Any:
    """Return a state with `function` applied to all values in its dictionaries, lists and tuples.

    Containers become dict, list and tuple, so that the state can be loaded with weights_only;
    OrderedDict and Counter, which can be loaded too, keep their type. If `function` changes a tuple
    itself, its result takes the tuple's place.
    """
    if isinstance(state, Mapping):
        kind: Any = type(state) if type(state) in (OrderedDict, Counter) else dict
        new = kind({key: map_state(value, function) for key, value in state.items()})
        if kind is OrderedDict and (versions := torch_private.versions_in_state(state)) is not None:
            # Its versions tell a module how to read a state of an earlier release.
            torch_private.set_versions_in_state(new, versions)
        return new
    if isinstance(state, list):
        return [map_state(value, function) for value in state]
    found = function(state)
    if found is state and isinstance(state, tuple):
        return tuple(map_state(value, function) for value in state)
    return found
