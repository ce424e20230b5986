"""Sharded checkpoints: assignment of tensors to the ranks that write them, and reading.

Of the ranks that hold replicas of a block of a sharded tensor, the first one writes the block.
Replicated tensors are spread over the ranks. All ranks compute the assignment from the grid,
without communication.
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

# Conversion of the values of a state to types that `torch.load` accepts with weights_only.


def storable(state: Any) -> Any:
    """Return a copy of `state` in types that `torch.load` accepts. No communication.

    Dataclasses become dictionaries, deques become lists, and paths become strings. NumPy's numbers
    become Python's, and its arrays become tensors. Instances of subclasses of dict, list, tuple and
    Tensor become instances of the base class. DistTensors and other values stay unchanged.
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
    """Return `state` with each DistTensor replaced by its global tensor. Collective.

    Raises DataError on every rank, if the DistTensors in `state` differ between ranks in number,
    shape, type, layout or grid.
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
    """Raise `ValueError` for a state that `torch.load` cannot load with weights_only.

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
    """Return the error that `torch.load` raises for `state`, in one line; "" if it raises none."""

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
    """Describe the first value in `state` that `torch.load` rejects, by its path and type.

    `state` is rejected, and `name` is its name, with which the path begins.
    """
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
"""The first entry of the pair (marker, tensor number) that replaces a tensor in a stored state."""

ShardPlace: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Where a block is stored: the number of the shard file, and the block's start and stop indices in
the global tensor."""

OpenShard: TypeAlias = Callable[[int], Mapping[int, Tensor]]
"""A function that takes the number of a shard file, and returns the blocks in the file by the
numbers of their tensors."""


@dataclass
class Divided:
    """A state split for writing: its values other than tensors, and this rank's blocks of tensors.

    Attributes
    ----------
    skeleton: the state, with each tensor replaced by a pair (marker, tensor number).
    table: for each tensor, its global shape and the places of its blocks.
    mine: the blocks that this rank writes, by the number of their tensor.
    """

    skeleton: Any
    table: list[tuple[tuple[int, ...], list[ShardPlace]]]
    mine: dict[int, Tensor]


def divide(state: Any, grid: Grid) -> Divided:
    """Assign the tensors in the dictionaries, lists and tuples of a state to ranks for writing.

    All ranks pass the same state, and compute the same assignment. No communication.
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
            # Copy, as torch.save writes the entire storage of a view.
            divided.mine[index] = own.detach().to("cpu", copy=True).contiguous()
        return _MARK, index

    divided.skeleton = map_state(state, number)
    return divided


class Stored:
    """A tensor stored in the shard files of a checkpoint, of which any box can be read.

    Parameters
    ----------
    number: the number of the tensor.
    shape: the shape of the global tensor.
    places: for each block, the number of its shard file, and its start and stop in the tensor.
    open_shard: takes the number of a shard file, and returns its blocks by tensor number.

    Raises ValueError if the blocks do not cover the tensor, each element once.
    """

    def __init__(
        self, number: int, shape: Sequence[int], places: Sequence[ShardPlace], open_shard: OpenShard
    ) -> None:
        self.shape = tuple(shape)
        _check_cover(self.shape, places)
        self._number, self._places, self._open = number, places, open_shard

    def box(self, box: Box | None = None) -> Tensor:
        """Return `box` of the tensor, by default the global tensor.

        Only shard files with blocks that intersect the box are opened. Raises ValueError if a
        stored block has another shape than in `places`.
        """
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
    """Return `skeleton`, from `divide`, with a `Stored` tensor in place of each tensor number.

    `table` has the shape and the places of the blocks of each tensor.
    """

    def tensor(x: Any) -> Any:
        if not _is_number(x):
            return x
        shape, places = table[x[1]]
        return Stored(x[1], shape, places, open_shard)

    return map_state(skeleton, tensor)


def numbered(skeleton: Mapping[str, Any]) -> dict[str, int]:
    """Return the tensor numbers in `skeleton`, a module's state from `divide`, by name."""
    return {name: x[1] for name, x in skeleton.items() if _is_number(x)}


def _is_number(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and x[0] == _MARK


def for_module(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Read a module's state from shard files, and return it for `load_state_dict` on this rank.

    `state` has `Stored` tensors by name. Of a sharded parameter only this rank's block is read.
    """
    targets = module.state_dict()
    return {name: _read_state(x, targets.get(name)) for name, x in state.items()}


def for_optimizer(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Read an optimizer's state from shard files, and return it for `load_full_state_dict`.

    `state` has `Stored` tensors; of sharded parameters' states only this rank's blocks are read.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    owners = dict(zip(numbers, parameters, strict=False))
    read = {
        number: _read_state(kept, owners.get(number)) for number, kept in state["state"].items()
    }
    whole: dict[str, Any] = _read_state({**state, "state": read}, None)
    return whole


def _read_state(state: Any, target: Any) -> Any:
    """Return `state` with each `Stored` tensor replaced by a tensor that this rank has read.

    `target` is the parameter that the state belongs to. If `target` is a DistTensor, a tensor with
    equally many dimensions becomes a DistTensor, partitioned like `target` along the dimensions of
    equal extents. Any other tensor is replicated.
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
    """Return the writing rank, start and stop of each block of the sharded tensor `x`.

    The first of the ranks that hold replicas of a block writes the block.
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
    """Raise `ValueError` unless blocks at `places` cover a tensor of `shape`, each element once.

    Each dimension is partitioned on its own. So the blocks must be all combinations of intervals
    along the dimensions, and the intervals of a dimension must be adjacent.
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
