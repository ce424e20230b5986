"""Random grids, tensors, layouts and arguments for properties, with one verdict on all ranks.

Under MPI every rank has to draw the same examples and to see the same verdict, or the ranks part
and wait for each other for ever. Hypothesis is deterministic as conftest configures it;
`on_any_grid` makes the verdict collective, so that shrinking follows one path on all ranks.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from torch import Tensor

import distconv as dc
from distconv.geometry.topology import AXES
from tests.support.geometry import cuts_of
from tests.support.serial import REFUSALS, TOLERANCE, agrees, examples, refused
from tests.support.verdicts import one_verdict

TIMES = settings().max_examples // 100
"""Multiplier of the number of examples: 1 by default, 50 nightly."""
RANKS = [1, 2, 4] if TIMES == 1 else [1, 2, 3, 4, 6, 8]
HALF = (torch.float16, torch.bfloat16)
FLOATING = (torch.float64, torch.float32, *HALF)
INTEGER = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def on_any_grid(
    count: int, more: Sequence[int] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a test of a `Case` hold for `count` random ones, and 50 times as many nightly.

    Whatever a rank raises, all raise, with the report of the first that did. Where ranks are many
    there are fewer `examples`, but not nightly, when all numbers of ranks are tried. By day the
    test runs on 1, 2 and 4 ranks, and on `more`.
    """
    wanted = count * TIMES if TIMES > 1 else len(examples(count))

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parallel(sorted({*RANKS, *more}))
        @pytest.mark.filterwarnings("ignore::UserWarning")
        @settings(max_examples=wanted)
        @given(case=st.data())
        @functools.wraps(test)
        def judge(case: st.DataObject, **parameters: Any) -> None:
            __tracebackhide__ = True
            with one_verdict():
                test(Case(case), **parameters)

        return judge

    return decorate


def _factors(n: int) -> list[int]:
    return (
        [] if n == 1 else [p := next(p for p in range(2, n + 1) if n % p == 0), *_factors(n // p)]
    )


@st.composite
def grids(draw: st.DrawFn) -> dc.ProcessGrid:
    """Draw a grid of all ranks, factored over the grid axes."""
    extents = dict.fromkeys(AXES, 1)
    for factor in _factors(MPI.COMM_WORLD.size):
        extents[
            draw(st.sampled_from(["height", "width", "sample", "channel", "depth", "filter"]))
        ] *= factor
    return dc.ProcessGrid(**extents)


@st.composite
def layouts(draw: st.DrawFn, grid: dc.ProcessGrid, shape: Sequence[int]) -> dc.Layout:
    """Draw a layout: each grid axis goes to a dimension, or to none, which replicates.

    Often all axes cut one dimension, in any order.
    """
    if shape and draw(st.integers(0, 3)) == 3:
        axes = [axis for axis in AXES if grid.topology.extent(axis) > 1]
        cuts: list[tuple[str, ...]] = [()] * len(shape)
        cuts[draw(st.integers(0, len(shape) - 1))] = tuple(draw(st.permutations(axes)))
        return dc.Layout.of(tuple(cuts))
    return dc.Layout.of(draw(cuts_of(grid.topology, len(shape))))


def _wild(x: Tensor, *values: float) -> Tensor:
    flat = x.flatten()
    for i, value in enumerate(values):
        flat[i + 1 :: 7] = value
    return flat.view(x.shape)


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "negative": lambda x: -1 - x.abs(),
    "ties": lambda x: x.round(),
    "equal": torch.ones_like,
    "nan": lambda x: _wild(x, torch.nan, torch.inf),
    "wild": lambda x: _wild(x, torch.nan, torch.inf, -torch.inf),
    "infinite": lambda x: _wild(x, torch.inf, -torch.inf),
    "positive": lambda x: x.abs() + 0.1,
}


def tensor_of(shape: Sequence[int], dtype: torch.dtype, kind: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    if not (dtype.is_floating_point or dtype.is_complex):
        return (3 * VALUES["normal" if kind in ("nan", "wild", "infinite") else kind](x)).to(dtype)
    return VALUES[kind](x).to(dtype)


def tolerance_of(*dtypes: torch.dtype) -> float:
    """Return the relative error that rounding in the coarsest of these types allows."""
    coarsest = max([torch.finfo(t).eps for t in dtypes if t.is_floating_point], default=0.0)
    return TOLERANCE if coarsest < 1e-10 else 1000 * coarsest if coarsest < 1e-4 else 8 * coarsest


def sizes(smallest: int = 1, largest: int = 12) -> st.SearchStrategy[int]:
    return st.integers(smallest, largest)


def shapes(least: int = 1, most: int = 4, largest: int = 9) -> st.SearchStrategy[list[int]]:
    """Return a strategy of shapes of `least` to `most` dimensions, some without elements."""
    size = st.one_of(sizes(1, largest), sizes(1, 5), st.integers(0, largest))
    return st.lists(size, min_size=least, max_size=most)


def each(elements: st.SearchStrategy[int], n: int) -> st.SearchStrategy[Any]:
    """Return a strategy of one number for all of `n` dimensions, or one for each."""
    return st.one_of(st.tuples(*[elements] * n), elements)


def derivable(result: Any) -> bool:
    """Return whether there are gradients: some of torch's functions have none in some types."""
    results = result if isinstance(result, (tuple, list)) else [result]
    results = [y for y in results if y.requires_grad]
    try:
        torch.autograd.backward(results, [torch.ones_like(y) for y in results])
    except RuntimeError:
        return False
    return True


class Case:
    """One example of a property: a grid, and the values that the test draws for it."""

    def __init__(self, data: st.DataObject):
        self._data = data
        self._tensors = 0
        self.grid: dc.ProcessGrid = self.draw(grids(), "grid")

    def draw(self, strategy: st.SearchStrategy[Any], label: str | None = None) -> Any:
        return self._data.draw(strategy, label)

    def one_of(self, *choices: Any) -> Any:
        """Draw one of some choices; the first is the simplest."""
        return self.draw(st.sampled_from(choices))

    def some(self, choices: Sequence[Any], least: int = 0) -> list[Any]:
        """Draw at least `least` of some choices, in any order."""
        order = self.draw(st.permutations(choices))
        return order[: self.draw(st.integers(least, len(choices)))]

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def plane(self, n: int, channels: int | None = None, smallest: int = 1) -> list[int]:
        """Draw a shape (sample, channel, *spatial), with few elements in three dimensions."""
        channels = self.draw(sizes(1, 4)) if channels is None else channels
        spatial = [self.draw(sizes(smallest, {1: 13, 2: 11, 3: 6}[n] + smallest)) for _ in range(n)]
        return [self.draw(sizes(1, 4)), channels, *spatial]

    def tensor(
        self, shape: Sequence[int], *kinds: str, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """Draw a tensor of one of these kinds of values, normal when none are named.

        It lies on the grid's device, where serial torch computes as well.
        """
        kind = self.one_of(*kinds) if kinds else "normal"
        self._tensors += 1000
        seed = self._tensors + self.draw(st.integers(0, 999))
        return tensor_of(shape, dtype, kind, seed).to(self.grid.device)

    def layout(self, shape: Sequence[int]) -> dc.Layout:
        return self.draw(layouts(self.grid, shape), "layout")

    def agrees(
        self,
        function: Callable[..., Any],
        *tensors: Tensor,
        cut: Sequence[int] | None = None,
        frozen: Sequence[int] = (),
        unsupported: str | None = None,
        tolerance: float | None = None,
    ) -> None:
        """Assert that a function agrees with serial, gradients included, or raises as serial does.

        Parameters
        ----------
        cut: the tensors that are distributed, the others stay plain; drawn when not given.
        frozen: the tensors that take no gradient, where serial torch has none.
        unsupported: what an `UnsupportedOperation` may say.
        """
        places = range(len(tensors))
        if cut is None:
            cut = self.some(places, least=1)
        # MPI cannot add up the ranks' parts of the gradient of a plain tensor of a half type.
        cut = sorted({*cut, *(i for i in places if tensors[i].dtype in HALF)})
        order = [*cut, *(i for i in places if i not in cut)]
        shares = [self.layout(tensors[i].shape) for i in cut]

        def call(*operands: Tensor) -> Any:
            by_place = dict(zip(order, operands, strict=True))
            return function(*(by_place[i].detach() if i in fixed else by_place[i] for i in places))

        fixed = set(frozen)
        inputs = [tensors[i] for i in cut]
        plain = [tensors[i] for i in order[len(cut) :]]
        rng = random.Random(0)
        if tolerance is None:
            tolerance = tolerance_of(*(t.dtype for t in tensors))
        try:
            leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in (*inputs, *plain)]
            result = call(*leaves)
        except REFUSALS as error:
            parts = zip(inputs, shares, strict=True)
            operands = [dc.distribute_tensor(x, self.grid, layout) for x, layout in parts]
            with one_verdict():
                try:
                    call(*operands, *plain)
                except (dc.UnsupportedOperation, type(error)):
                    return
                raise AssertionError("serial torch raises, and this rank does not") from error
        if not derivable(result):  # by serial torch; values alone are compared
            fixed.update(places)
        try:
            agrees(call, inputs, plain, self.grid, rng, shares, tolerance)
        except dc.UnsupportedOperation as error:
            if unsupported is None or not re.search(unsupported, str(error)):
                raise
            refused(call, inputs, plain, self.grid, rng, shares, dc.UnsupportedOperation)
