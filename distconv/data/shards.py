"""The tensors of a state, split over the ranks that write them, and joined again from the files.

Every rank writes the blocks of sharded tensors of which it is the first holder, and its share of
the replicated tensors. Which rank writes which tensor follows from the grid without communication.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from distconv.data.errors import check_alike
from distconv.geometry.layout import Box, operand_cuts, rank_box, replicating_axes
from distconv.grid.interface import Grid
from distconv.model.state_dicts import map_state, plain, whole
from distconv.tensor.dist_tensor import DistTensor

# The values of a state as plain ones, which `torch.load` accepts with weights_only.


def storable(state: Any) -> Any:
    """Return a state of plain values and containers. No communication.

    Dataclasses become dictionaries, deques lists, numbers and arrays of numpy Python's numbers and
    tensors, and paths texts; subclasses of dict, list, tuple and Tensor become these. Other values
    stay as they are, and DistTensors too.
    """
    return map_state(state, _storable)


def _storable(x: Any) -> Any:
    if is_dataclass(x) and not isinstance(x, type):
        return storable({field.name: getattr(x, field.name) for field in fields(x)})
    if isinstance(x, deque):
        return storable(list(x))
    if isinstance(x, PurePath):
        return str(x)
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, np.ndarray) and x.dtype.kind in "biufc":
        return torch.tensor(x.astype(x.dtype.newbyteorder("="), copy=False))
    return x if isinstance(x, DistTensor) else plain(x)


def gathered(state: Any, grid: Grid) -> Any:
    """Return a state with each DistTensor replaced by the whole tensor. Collective.

    Raises DataError on every rank, if the ranks hold different DistTensors in it.
    """
    found: list[str] = []

    def note(x: Any) -> Any:
        if isinstance(x, DistTensor):
            found.append(f"{tuple(x.shape)} of {x.dtype} in {x.grid_layout} on {x.grid}")
        return x

    map_state(state, note)
    check_alike(grid, {"the DistTensors of the state": str(found)}, "Pass the same on every rank.")
    return map_state(state, whole)


def check_loadable(state: dict[Any, Any]) -> None:
    """Raise `ValueError` for a state that `torch.load` would refuse with weights_only.

    The message names the first entry that cannot be loaded.
    """
    for name, part in state.items():
        reason = _unloadable(part)
        if reason:
            raise ValueError(
                "the state holds objects that cannot be loaded safely: "
                f"{_first(part, str(name))}; save only plain numbers, strings, paths, tensors, "
                f"and lists, dictionaries and dataclasses of them ({reason[:300]})"
            )


def _unloadable(state: Any) -> str:
    """Return the error of `torch.load` for a state, in one line; "" if it would be loaded."""

    def small(x: Any) -> Any:
        usual = type(x) is Tensor and x.layout == torch.strided and not x.is_quantized
        return torch.empty(0, dtype=x.dtype) if usual else x

    file = io.BytesIO()
    try:
        torch.save(map_state(state, small), file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:  # torch raises any error of its pickler
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def _first(state: Any, name: str) -> str:
    """Return a text with the name and type of the first value that makes `state` unloadable."""
    items: Any = ()
    if isinstance(state, Mapping):
        items = state.items()
    elif isinstance(state, list | tuple):
        items = enumerate(state)
    for key, value in items:
        if _unloadable(value):
            return _first(value, f"{name}[{key!r}]")
    return f"{name} is of type {type(state).__name__}"


_MARK = "distconv tensor"
"""A marker that stands beside the number of a tensor, in its place in the skeleton of a state."""

ShardPlace: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The number of a shard, and the start and stop of its block in the whole tensor."""

OpenShard: TypeAlias = Callable[[int], Mapping[int, Tensor]]
"""A function that returns the blocks in a shard, by the numbers of their tensors."""


@dataclass
class Divided:
    """A state split for writing: its values other than tensors, and this rank's blocks of tensors.

    Attributes
    ----------
    skeleton: the state, with a number in the place of each tensor.
    table: for each tensor, its shape and the places of its blocks: the number of the shard, and the
        start and stop of the block in the tensor.
    mine: the blocks that this rank writes, by the number of their tensor.
    """

    skeleton: Any
    table: list[tuple[tuple[int, ...], list[ShardPlace]]]
    mine: dict[int, Tensor]


def divide(state: Any, grid: Grid) -> Divided:
    """Split the tensors in the dictionaries, lists and tuples of a state over all ranks.

    Every rank passes the same state, whose DistTensors hold its own blocks. No communication.
    """
    divided = Divided(None, [], {})
    loads = [0] * grid.size

    def number(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            return x  # a sparse tensor stays in the skeleton
        index = len(divided.table)
        shape = tuple(x.shape)
        if isinstance(x, DistTensor):
            places = _places(x, grid)
            for rank, start, stop in places:
                loads[rank] += prod(b - a for a, b in zip(start, stop, strict=True))
            own = x.shard
        else:
            writer = loads.index(min(loads))
            loads[writer] += x.numel()
            places, own = [(writer, (0,) * len(shape), shape)], plain(x)
        divided.table.append((shape, places))
        if any(rank == grid.rank for rank, _, _ in places):
            # A copy: of a view, the whole underlying memory would be written.
            divided.mine[index] = own.detach().to("cpu", copy=True).contiguous()
        return _MARK, index

    divided.skeleton = map_state(state, number)
    return divided


class Stored:
    """A tensor in the shards of a checkpoint, of which any box can be read.

    Parameters
    ----------
    number: the number of the tensor.
    shape: the shape of the whole tensor.
    places: for each block, the number of the shard that holds it, and the block's start and stop in
        the tensor.
    open_shard: takes the number of a shard, and returns its blocks by the numbers of their tensors.

    Raises ValueError if the blocks do not cover the tensor, each element once.
    """

    def __init__(
        self, number: int, shape: Sequence[int], places: Sequence[ShardPlace], open_shard: OpenShard
    ) -> None:
        self.shape = tuple(shape)
        _check_cover(self.shape, places)
        self._number, self._places, self._open = number, places, open_shard

    def box(self, box: Box | None = None) -> Tensor:
        """Return a box of the tensor, or all of it; opens only shards that intersect the box."""
        wanted = Box((0,) * len(self.shape), self.shape) if box is None else box
        found: Tensor | None = None
        for shard, start, stop in self._places:
            held = Box(tuple(start), tuple(stop))
            part = wanted.intersection(held)
            if part is None and found is not None:
                continue
            block = self._open(shard)[self._number]
            if tuple(block.shape) != held.shape:
                raise ValueError(
                    f"shard {shard} holds a block of {tuple(block.shape)} for {start} to {stop}"
                )
            if found is None:
                found = block.new_empty(wanted.shape)
            if part is not None:
                found[part.slices_within(wanted)] = block[part.slices_within(held)]
        assert found is not None
        return found


def restored(
    skeleton: Any,
    table: Sequence[tuple[Sequence[int], Sequence[ShardPlace]]],
    open_shard: OpenShard,
) -> Any:
    """Return a state with a `Stored` tensor in the place of each number that `divide` put there."""

    def tensor(x: Any) -> Any:
        if not _is_number(x):
            return x
        shape, places = table[x[1]]
        return Stored(x[1], shape, places, open_shard)

    return map_state(skeleton, tensor)


def numbered(skeleton: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of the tensors in a module's state that `divide` split, by name."""
    return {name: x[1] for name, x in skeleton.items() if _is_number(x)}


def _is_number(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and x[0] == _MARK


def for_module(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return the state to pass to a module's `load_state_dict` on this rank, read from shards.

    Of a sharded parameter only this rank's block is read.
    """
    targets = module.state_dict()
    return {name: _for(x, targets.get(name)) for name, x in state.items()}


def for_optimizer(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state to pass to an optimizer's `load_full_state_dict`, read from shards."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    owners = dict(zip(numbers, parameters, strict=False))
    read = {number: _for(kept, owners.get(number)) for number, kept in state["state"].items()}
    whole: dict[str, Any] = _for({**state, "state": read}, None)
    return whole


def _for(state: Any, target: Any) -> Any:
    """Return a state with each `Stored` tensor replaced by this rank's block of it.

    `target` is the parameter that the state belongs to. A tensor with as many dimensions is cut as
    `target` is, along the dimensions with equal extents; others are whole on every rank.
    """

    def own(x: Any) -> Any:
        if not isinstance(x, Stored):
            return x
        if not isinstance(target, DistTensor) or len(x.shape) != target.dim():
            return x.box()
        grid = target.grid
        cuts = operand_cuts(x.shape, tuple(target.shape), target.cuts)
        block = x.box(rank_box(x.shape, cuts, grid.topology, grid.rank))
        return DistTensor(block.to(grid.device), x.shape, cuts, grid)

    return map_state(state, own)


def _places(x: DistTensor, grid: Grid) -> list[ShardPlace]:
    """Return for each block of a sharded tensor the rank that writes it, and its start and stop.

    Of several ranks that hold replicas of a block, the first one writes it.
    """
    topology = grid.topology
    copies = replicating_axes(x.cuts, topology)
    places = []
    for rank in range(grid.size):
        if not any(topology.coordinate(rank, axis) for axis in copies):
            box = rank_box(tuple(x.shape), x.cuts, topology, rank)
            places.append((rank, box.start, box.stop))
    return places


def _check_cover(shape: tuple[int, ...], places: Sequence[ShardPlace]) -> None:
    """Raise `ValueError` unless blocks cover a tensor of this shape, each element once.

    A tensor is cut along each dimension alone. So its blocks are all combinations of the intervals
    along its dimensions, and these intervals follow each other.
    """
    boxes = {tuple(zip(start, stop, strict=True)) for _, start, stop in places}
    filled = [box for box in boxes if all(a < b for a, b in box)]
    along = [sorted(set(intervals)) for intervals in zip(*filled, strict=True)]
    covered = len(along) == len(shape) and all(
        [0, *(b for _, b in intervals)] == [*(a for a, _ in intervals), n]
        for n, intervals in zip(shape, along, strict=True)
    )
    if prod(shape) and not (covered and len(filled) == prod(map(len, along))):
        raise ValueError(f"the blocks {list(places)} do not cover a tensor of shape {shape}")
