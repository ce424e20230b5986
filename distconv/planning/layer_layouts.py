"""`plan_layouts`: the best layout of each layer on a grid, found as a shortest path.

The method is that of Dryden et al., "Channel and Filter Parallelism for Large-Scale CNN Training"
(SC 2019). A vertex is a layer with a layout of its input; its weight is the time of the layer. An
edge connects two consecutive layers; its weight is the time to redistribute the input of the second
layer, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from distconv.comm.ledger import without_counting
from distconv.geometry.index_maps import Same
from distconv.geometry.layout import Cuts, Layout, default_cuts, dimension_names
from distconv.geometry.plan import make_plan
from distconv.planning.dry_run import DryRunGrid, without_elements
from distconv.planning.machine import Machine
from distconv.planning.operators import OperatorTimes
from distconv.planning.prediction import Prediction, in_words, predict
from distconv.planning.recorded_step import dtype_of, record_step, shapes_of
from distconv.planning.recording import Recording
from distconv.planning.timeline import messages_cost, play
from distconv.tensor.base import tensors_in
from distconv.tensor.redistribution import cuts_of_layout

State = TypeVar("State")

MOST_LAYOUTS = 32
"""The largest number of layouts that are tried for each layer."""


@dataclass(frozen=True)
class LayoutPlan:
    """The layouts that `plan_layouts` found; prints as the argument `layouts` of `parallelize`."""

    grid: dict[str, int]
    layouts: dict[str, Layout]
    """The argument `layouts` of `parallelize`: an input layout for each layer whose input must be
    redistributed."""
    prediction: Prediction
    """The predicted step with `layouts`."""
    uniform: Prediction
    """The predicted step without `layouts`."""

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON: each layer's dimensions with their axes, and the seconds."""
        return {
            "layouts": {
                name: {
                    dimension: list(axes)
                    for dimension, axes in zip(dimension_names(5), layout.cuts(5), strict=True)
                    if axes
                }
                for name, layout in self.layouts.items()
            },
            "seconds": self.prediction.seconds,
            "uniform_seconds": self.uniform.seconds,
        }

    def __str__(self) -> str:
        gain = self.uniform.seconds / self.prediction.seconds - 1
        if not self.layouts:
            return f"on {in_words(self.grid)} no layer gains from its own layout"
        lines = [f"    {name!r}: {layout!r}," for name, layout in self.layouts.items()]
        return "\n".join(
            (
                f"on {in_words(self.grid)} a step takes {gain:.1%} longer without these layouts:",
                "layouts={",
                *lines,
                "}",
            )
        )


class ChainedLayer(NamedTuple):
    """A layer whose input is the output of the previous layer, with the input's shape and type."""

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    """The global shape of the layer's input."""
    dtype: torch.dtype


def plan_layouts(
    module: nn.Module,
    shape: Sequence[int] | Sequence[Sequence[int]],
    grid: Mapping[str, int],
    machine: Machine,
    *,
    layout: Layout | None = None,
    layouts: Mapping[str, Layout] | None = None,
    progress: Callable[[str], object] = lambda what: None,
    **options: Any,
) -> LayoutPlan:
    """Return layouts for the inputs of layers that minimize the predicted time of a training step.

    A module whose children are called one after the other, each on the result of the previous
    child, is divided into its children, and each child likewise. Any other module, such as one with
    branches, gets one layout as a whole. If the layouts together do not shorten the predicted step,
    the plan has none.

    Parameters
    ----------
    module, shape, grid, layout, options: as for `predict`.
    layouts: layouts for the inputs of submodules, as for `predict`; used for submodules for which
        the search finds none.
    progress: called with a text on the size of the search.

    Examples
    --------
    >>> machine = dc.planning.Machine.load("frontier")
    >>> with torch.device("meta"):  # weights without elements suffice
    ...     net = nn.Sequential(nn.Flatten(), nn.Linear(65536, 4096))
    >>> print(dc.planning.plan_layouts(net, (32, 64, 32, 32), {"sample": 8}, machine))
    on sample=8 a step takes 0.6% longer without these layouts:
    layouts={
        '0': Layout(channel='sample'),
    }
    """
    shapes = shapes_of(shape)
    options = {"layout": layout, **options}
    given = dict(layouts or {})
    uniform = predict(module, shapes, grid, machine, layouts=given, **options)
    hollow = without_elements(module, "plan_layouts")
    chain = chain_of(hollow, DryRunGrid({}), shapes, options.get("dtype"))
    costs = _Costs(grid, machine, layout, len(shapes[0]))
    found: dict[str, Layout] = {}
    if len(shapes) == 1 and len(chain) > 1:
        progress(f"{len(chain)} layers, each in up to {MOST_LAYOUTS} layouts")
        costs.prepare(chain)
        path = shortest_path(
            [costs.layouts(layer) for layer in chain],
            lambda i, cuts: costs.seconds(chain[i], cuts),
            lambda i, a, b: costs.between(chain, i, a, b),
            costs.first,
        )
        comes = costs.first
        for layer, cuts in zip(chain, path, strict=True):
            if cuts != comes:
                found[layer.name] = Layout.of(cuts)
            comes = costs.record(layer, cuts)[1] or ((),) * len(cuts)
    best = uniform
    if found:
        best = predict(module, shapes, grid, machine, layouts=given | found, **options)
    if best.seconds >= uniform.seconds:
        found, best = {}, uniform
    return LayoutPlan(dict(uniform.grid), found, best, uniform)


def shortest_path(
    choices: Sequence[Sequence[State]],
    vertex: Callable[[int, State], float],
    edge: Callable[[int, State, State], float],
    first: State,
) -> list[State]:
    """Return the path of least total cost: one state from each of `choices`, in order.

    `vertex(i, state)` is the cost of `state` in `choices[i]`. `edge(i, before, state)` is the cost
    of the step to `state` from the state `before` in `choices[i - 1]`, or from `first` if i is 0.
    """
    reached: list[tuple[float, list[State]]] = [(0.0, [])]
    before: Sequence[State] = [first]
    for i, states in enumerate(choices):
        arrived = []
        for state in states:
            cost, path = min(
                (
                    (so_far + edge(i, last, state), path)
                    for (so_far, path), last in zip(reached, before, strict=True)
                ),
                key=lambda option: option[0],
            )
            arrived.append((cost + vertex(i, state), [*path, state]))
        reached, before = arrived, states
    return min(reached, key=lambda option: option[0])[1]


def chain_of(
    module: nn.Module,
    grid: DryRunGrid,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype | None = None,
) -> list[ChainedLayer]:
    """Return the layers of a module, if each is called on the result of the previous layer.

    A module whose children do not form such a chain is one layer. `module` has no elements, and
    runs on `grid` with inputs of the global `shapes`.
    """
    calls: dict[nn.Module, list[tuple[Any, Any]]] = {}
    """The arguments and the result of each call of each module, in the order of the first calls."""

    def leave(part: nn.Module, args: Any, result: Any) -> None:
        calls.setdefault(part, []).append((args, result))

    hooks = [part.register_forward_hook(leave) for part in module.modules()]
    try:
        with torch.no_grad(), without_counting():
            module(*(grid.tensor(shape, None, dtype or dtype_of(module)) for shape in shapes))
    finally:
        for hook in hooks:
            hook.remove()
    names = {part: name for name, part in module.named_modules()}

    def expand(part: nn.Module) -> Iterator[ChainedLayer]:
        ((args, result),) = calls[part]
        within = set(part.children())
        children = [child for child in calls if child in within]
        if children and _is_chain([calls[child] for child in children], args, result):
            for child in children:
                yield from expand(child)
        elif tensors_in(args):
            x = tensors_in(args)[0]
            yield ChainedLayer(names[part], part, tuple(x.shape), x.dtype)

    return list(expand(module)) if len(calls.get(module, ())) == 1 else []


def _is_chain(calls: Sequence[Sequence[tuple[Any, Any]]], args: Any, result: Any) -> bool:
    """Return whether modules were called once each, on the tensor that the previous one returned.

    `calls` has the arguments and the result of each call of each module, in order; `args` and
    `result` are those of the parent module.
    """
    comes = args
    for several in calls:
        inputs = tensors_in(several[0][0])
        if len(several) != 1 or len(inputs) != 1 or inputs[0] is not tensors_in(comes)[0]:
            return False
        comes = several[0][1]
    # The parent module's own work on the last result runs in the layout of the last layer.
    return len(tensors_in(result)) == 1


class _Costs:
    """Predicted seconds of layers and of redistributions between layers, on the slower of 2 ranks.

    The first rank of the grid has the largest block of every tensor, and the middle rank the most
    neighbours.
    """

    def __init__(self, grid: Mapping[str, int], machine: Machine, layout: Layout | None, ndim: int):
        self._grid, self._machine = grid, machine
        self._dry = DryRunGrid(grid)
        self.first = cuts_of_layout(layout, self._dry, ndim)
        """The cuts of the chain's input: for each dimension, the grid axes that partition it."""
        self._ranks = tuple({0, self._dry.rank})
        self._times = OperatorTimes(machine, machine.at_once(self._dry.size))
        self._recorded: dict[object, tuple[Sequence[Recording], Cuts | None]] = {}

    def layouts(self, layer: ChainedLayer) -> list[Cuts]:
        """Return at most `MOST_LAYOUTS` cuts to try for a layer's input.

        First are the cuts of the chain's input and the default cuts, then all cuts in which every
        axis of the grid partitions a dimension.
        """
        ndim = len(layer.shape)
        axes = [axis for axis, n in self._grid.items() if n > 1]
        found = [self.first] if len(self.first) == ndim else []
        found.append(default_cuts(ndim, self._dry.topology))
        for chosen in product(range(ndim), repeat=len(axes)):
            pairs = list(zip(axes, chosen, strict=True))
            cuts: Cuts = tuple(tuple(a for a, d in pairs if d == i) for i in range(ndim))
            parts = map(self._dry.topology.parts, cuts)
            if all(p <= n for p, n in zip(parts, layer.shape, strict=True)):
                found.append(cuts)
        return list(dict.fromkeys(found))[:MOST_LAYOUTS]

    def prepare(self, chain: Sequence[ChainedLayer]) -> None:
        """Record each layer of `chain` with all cuts to try, and time the local operators."""
        several = [self.record(layer, cuts)[0] for layer in chain for cuts in self.layouts(layer)]
        self._times.prepare_approximately([r.operators for each in several for r in each])

    def seconds(self, layer: ChainedLayer, cuts: Cuts) -> float:
        """Return the seconds of a layer with input `cuts`, both passes; inf if unsupported."""
        return max(map(self._played, self.record(layer, cuts)[0]), default=inf)

    def _played(self, recording: Recording) -> float:
        segments = play([recording], self._machine, self._times).segments[recording.rank]
        return sum(s.stop - s.start for s in segments if s.place.layer in recording.shapes)

    def between(self, chain: Sequence[ChainedLayer], i: int, last: Cuts, cuts: Cuts) -> float:
        """Return the seconds to redistribute the input of layer `i`, and its gradient, to `cuts`.

        `last` are the cuts of the input of layer i - 1, which determine the cuts of its output.
        Returns infinity if layer i - 1 does not support `last`, or if `cuts` have another number of
        dimensions.
        """
        comes = last if i == 0 else self.record(chain[i - 1], last)[1]
        if comes is None or len(comes) != len(cuts):
            return inf
        if comes == cuts:
            return 0.0
        # An input that needs no gradient is not redistributed backward.
        passes = 1 if i == 0 else 2
        return max(self._moved(chain[i], comes, cuts, rank, passes) for rank in self._ranks)

    def _moved(self, layer: ChainedLayer, comes: Cuts, cuts: Cuts, rank: int, passes: int) -> float:
        """Return the seconds in which a rank redistributes a layer's input to other cuts.

        `comes` are the cuts before, `cuts` the cuts after. `passes` is 1 for the forward pass
        alone, 2 to redistribute the gradient as well.
        """
        size = layer.dtype.itemsize
        needs = (Same(),) * len(cuts)
        plan = make_plan(self._dry.topology, rank, layer.shape, comes, cuts, needs)
        arriving = [(r.peer, size * r.size) for r in plan.receives]
        leaving = [(r.peer, size * r.size) for r in plan.sends]
        packed = 2 * self._machine.packing.at(sum(n for _, n in arriving + leaving))
        return passes * messages_cost(rank, arriving, leaving, self._machine).total + packed

    def record(self, layer: ChainedLayer, cuts: Cuts) -> tuple[Sequence[Recording], Cuts | None]:
        """Return recordings of a layer whose input has `cuts`, and the cuts of its output.

        Returns `(), None` if the layer does not support the cuts. There is a recording for each
        rank.
        """
        key = _key(layer, cuts)
        if key not in self._recorded:
            options: Any = {"layout": Layout.of(cuts), "dtype": layer.dtype, "loss": _total}
            options |= {"gpu": self._machine.asynchronous, "input_gradients": True}
            try:
                recordings = [
                    record_step(layer.module, [layer.shape], self._grid, rank=rank, **options)
                    for rank in self._ranks
                ]
                output = recordings[0].calls[-1]
                assert output.layout is not None and output.shape is not None
                self._recorded[key] = recordings, output.layout.cuts(len(output.shape))
            except RuntimeError:
                self._recorded[key] = (), None
        return self._recorded[key]


def _total(output: Any) -> Tensor:
    return tensors_in(output)[0].sum()


def _key(layer: ChainedLayer, cuts: Cuts) -> object:
    """Return a key that is equal for layers and `cuts` whose recordings are the same."""
    weights = tuple(tuple(p.shape) for p in layer.module.parameters())
    return repr(layer.module), weights, layer.shape, layer.dtype, cuts
