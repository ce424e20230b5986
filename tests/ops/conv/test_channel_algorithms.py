"""Layers on cut channels equal serial by all algorithms, and move as much as their formulas say."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import distconv as dc
from distconv import layers
from distconv.comm.ledger import trace_movements
from distconv.geometry.index_maps import Same, Window
from distconv.ops.conv import channel_algorithms, functions
from distconv.ops.conv.channel_algorithms import Division, communication_volume, parallel
from distconv.transport.interface import Message
from tests.support.serial import TOLERANCE, agrees, deviation, noted, random_layout, random_tensor

RANKS = [2, 4]
ALGORITHMS = ["x", "y", "w", "auto"]
CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}

GRIDS: dict[int, list[dict[str, int]]] = {
    2: [{"channel": 2}],
    4: [
        {"channel": 4},
        {"channel": 2, "filter": 2},
        {"channel": 2, "height": 2},
        {"sample": 2, "channel": 2},
    ],
}


def grids() -> Iterator[tuple[dc.ProcessGrid, dc.Layout]]:
    """Yield grids, and layouts whose channels are cut over one or two of their axes."""
    for extents in GRIDS[MPI.COMM_WORLD.size]:
        grid = dc.ProcessGrid(**extents)
        space: dict[str, Any] = {a: a for a in extents if a not in ("channel", "filter")}
        yield grid, dc.Layout(channel="channel", **space)
        if "filter" in extents:
            yield grid, dc.Layout(channel=("channel", "filter"), **space)
            yield grid, dc.Layout(channel=("filter", "channel"), **space)


def by(algorithm: str, function: Callable[..., Any], **arguments: Any) -> Callable[..., Any]:
    def call(*tensors: Tensor) -> Any:
        with parallel(algorithm):
            return function(*tensors, **arguments)

    return call


def fitted(layout: dc.Layout, n: int) -> dc.Layout:
    """Return the layout for `n` spatial dimensions; the axes of missing ones cut the last."""
    cuts = dict(layout._cut)
    names = ("depth", "height", "width")[3 - n :]
    functions = [cuts.pop(a, ()) for a in ("depth", "height", "width")]
    axes = tuple(a for some in functions for a in some)
    return dc.Layout(**cuts, **({names[0]: axes} if axes else {}))


def random_convolution(rng: random.Random, n: int) -> tuple[list[int], list[int], dict[str, Any]]:
    """Draw shapes and arguments that convolution and transposed convolution take."""
    plane = [rng.randrange(5, 10) for _ in range(n)]
    kernel = [rng.choice([1, 2, 3]) for _ in range(n)]
    arguments = dict(
        stride=[rng.choice([1, 1, 2]) for _ in range(n)],
        padding=[rng.randrange((k + 1) // 2) for k in kernel],
        dilation=rng.choice([1, 1, 2]),
    )
    return [rng.choice([2, 3]), rng.randrange(1, 10), *plane], kernel, arguments


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n", [2])
def test_groups_equal_serial_whether_they_lie_on_one_rank_or_several(
    n: int, transposed: bool
) -> None:
    rng = random.Random(n)
    for grid, layout in grids():
        for groups, inward, outward in ((4, 2, 1), (6, 1, 1), (5, 1, 2), (3, 2, 3), (2, 4, 3)):
            shape, kernel, arguments = random_convolution(rng, n)
            shape[1] = groups * inward
            pair = (shape[1], outward) if transposed else (groups * outward, inward)
            function = (TRANSPOSED if transposed else CONV)[n]
            sizes = (shape, (*pair, *kernel), (groups * outward,))
            tensors = [random_tensor(rng, s) for s in sizes]
            with noted(grid, layout, shape, pair, kernel, groups, arguments):
                call = by("auto", function, groups=groups, **arguments)
                agrees(call, tensors[:1], tensors[1:], grid, rng, [fitted(layout, n)])


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fully_connected_layers_of_cut_features_equal_serial(algorithm: str) -> None:
    rng = random.Random(4)
    for grid, layout in grids():
        axes = layout.cuts(4)[1]
        for shape in ((4, 7), (2, 3, 4, 8), (5,)):
            cuts: list[tuple[str, ...]] = [()] * len(shape)
            cuts[-1] = axes
            filters = rng.randrange(1, 9)
            tensors = [random_tensor(rng, s) for s in (shape, (filters, shape[-1]), (filters,))]
            with noted(grid, shape, filters, axes):
                call = by(algorithm, F.linear)
                agrees(call, tensors[:1], tensors[1:], grid, rng, [dc.Layout.of(tuple(cuts))])


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("kind", ["convolution", "transposed", "groups", "linear"])
def test_weights_that_are_cut_themselves_decide(kind: str) -> None:
    rng = random.Random(kind)
    for grid, layout in grids():
        for given in ("own", "filters", "channels", "random"):
            filters, inward = rng.choice([(5, 3), (4, 8), (8, 4)])
            groups = 2 if kind == "groups" else 1
            plane, kernel = ((), ()) if kind == "linear" else ((6, 5), (3, 2))
            pair = (inward, filters) if kind == "transposed" else (groups * filters, inward)
            w = random_tensor(rng, (*pair, *kernel))
            x = random_tensor(rng, (2, groups * inward, *plane))
            b = random_tensor(rng, (groups * filters,))
            function: Any = {"linear": F.linear, "transposed": F.conv_transpose2d}.get(
                kind, F.conv2d
            )
            cut = dc.Layout(**{k: a for k, a in layout._cut if plane or k in ("sample", "channel")})
            free = [a for a, n in grid.shape.items() if n > 1 and a in ("channel", "filter")]
            share = {
                "own": dc.Layout(filter=free[1:], channel=free[0]),
                "filters": dc.Layout(filter=free),
                "channels": dc.Layout(channel=free),
                "random": random_layout(rng, grid, (99, 99, *kernel)),
            }[given]
            arguments = {} if kind == "linear" else {"groups": groups}
            with noted(grid, cut, share, x.shape, w.shape):
                call = by(rng.choice(ALGORITHMS), function, **arguments)
                agrees(call, [x, w], [b], grid, rng, [cut, share])
                if given == "own" and free[1:] and groups == 1:
                    y = call(
                        dc.distribute_tensor(x, grid, cut), dc.distribute_tensor(w, grid, share)
                    )
                    first, second = share.cuts(w.dim())[:2]
                    turned = kind == "transposed"
                    assert y.cuts[1] == ((*second, *first) if turned else (*first, *second))


@pytest.mark.parallel([2, 4])
def test_halos_of_channel_blocks_travel_while_they_are_convolved() -> None:
    rng = random.Random(6)
    grid = dc.ProcessGrid(channel=2, height=-1)
    layout = dc.Layout(channel="channel", height="height")
    with mock.patch.object(
        functions, "overlapped_convolution", wraps=functions.overlapped_convolution
    ) as overlapped:
        for groups, channels_, filters in ((1, 5, 3), (4, 4, 8), (3, 3, 3)):
            x = random_tensor(rng, (2, channels_, 24, 7))
            parameters = [
                random_tensor(rng, s) for s in ((filters, channels_ // groups, 3, 3), (filters,))
            ]

            def function(x: Tensor, w: Tensor, b: Tensor, groups: int = groups) -> Tensor:
                with dc.method("overlapped"), parallel("x"):
                    return F.conv2d(x, w, b, padding=1, groups=groups)

            agrees(function, [x], parameters, grid, rng, [layout])
    assert overlapped.call_count == (3 if grid.size > 2 else 0)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("algorithm", ["x", "y", "w"])
def test_second_derivatives_are_the_serial_ones(algorithm: str) -> None:
    rng = random.Random(7)
    for grid, layout in grids():
        x, w = random_tensor(rng, (2, 5, 6, 5)), random_tensor(rng, (4, 5, 3, 3))
        b = random_tensor(rng, (4,)).requires_grad_()

        def product(x: Tensor, w: Tensor, b: Tensor = b) -> tuple[Tensor, ...]:
            with parallel(algorithm):
                loss = F.conv2d(x, w, b, padding=1).tanh().square().sum()
            g, h = torch.autograd.grad(loss, [x, w], create_graph=True)
            return torch.autograd.grad((g * x).sum() + (h * w).sum(), [x, w])

        expected = product(x.requires_grad_(), w.requires_grad_())
        d = dc.distribute_tensor(x.detach(), grid, layout).requires_grad_()
        cut = dc.distribute_tensor(w.detach(), grid, dc.Layout(filter="channel")).requires_grad_()
        for other in (w, cut):
            for got, wanted in zip(product(d, other), expected, strict=True):
                assert deviation(got, wanted) <= TOLERANCE


@contextmanager
def received(grid: dc.ProcessGrid) -> Iterator[list[int]]:
    """Yield a list that grows by the elements of each message that arrives at this rank."""
    arrived: list[int] = []
    carrier = grid.transport
    exchange = carrier.exchange

    def counted(arriving: Sequence[Message], leaving: Sequence[Message], tag: int) -> Any:
        arrived.extend(tensor.numel() for _, tensor in arriving)
        return exchange(arriving, leaving, tag)

    with mock.patch.object(carrier, "exchange", counted):
        yield arrived


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("function", [F.conv2d, F.conv_transpose2d])
def test_groups_that_lie_on_one_rank_move_nothing(function: Callable[..., Tensor]) -> None:
    size = MPI.COMM_WORLD.size
    grid = dc.ProcessGrid(channel=-1)
    for groups, inward, outward in ((2 * size, 3, 2), (size, 1, 1), (2 * size + 1, 1, 1)):
        x = dc.distribute_tensor(torch.randn(2, groups * inward, 6, 5), grid).requires_grad_()
        pair = (groups * outward, inward) if function is F.conv2d else (groups * inward, outward)
        w = torch.randn(*pair, 3, 3, requires_grad=True)
        with received(grid) as arrived, trace_movements() as movements:
            y = function(x, w, padding=1, groups=groups)
            assert y.grid_layout == x.grid_layout
            y.sum().backward()
        assert not arrived
        assert not any(m.bytes for m in movements)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("algorithm", ["x", "y", "w"])
def test_what_arrives_is_what_the_choice_is_made_by(algorithm: str) -> None:
    rng = random.Random(8)
    for grid, layout in grids():
        axes = layout.cuts(4)[1]
        idle = tuple(a for a in ("filter",) if a not in axes and grid.shape[a] > 1)
        divisions = {
            "x": Division(channels=axes),
            "y": Division(filters=axes),
            "w": Division(axes[:1], axes[1:] or idle),
        }
        division = divisions[algorithm]
        if algorithm == "w" and not division.filters:
            continue
        for shape, filters in (((2, 8, 6, 5), 4), ((3, 5, 7, 5), 9), ((2, 1, 5, 5), 1)):
            x = dc.distribute_tensor(random_tensor(rng, shape), grid, layout).requires_grad_()
            w = random_tensor(rng, (filters, shape[1], 3, 3)).requires_grad_()
            made = (shape[0], filters, *shape[2:])
            with received(grid) as arrived:
                y = by(algorithm, F.conv2d, padding=1)(x, w)
                y.backward(torch.ones(made, dtype=y.dtype))
            needs: list[Any] = [Window(3, padding=(1, 1)) if c else Same() for c in x.cuts[2:]]
            geometry = shape, x.cuts, made, (Same(), Same(), *needs), 1, division
            with noted(grid, layout, shape, filters):
                assert y.cuts[1] == division.output
                assert sum(arrived) == communication_volume(grid.topology, grid.rank, *geometry)


@pytest.mark.parallel([1])
def test_volumes_of_even_blocks_are_those_of_the_paper() -> None:
    from distconv.geometry.topology import Topology

    samples, inward, outward, plane = 4, 24, 16, 6 * 6
    grid = Topology((1, 4, 2, 1, 1, 1))
    one, both = ("channel",), ("channel", "filter")

    def of(axes: tuple[str, ...], division: Division) -> int:
        cuts = ((), axes, (), ())
        shapes = (samples, inward, 6, 6), cuts, (samples, outward, 6, 6)
        return communication_volume(grid, 3, *shapes, (Same(),) * 4, 1, division)

    # Each of p ranks gets all but its own of the input, or all other sums for its own filters.
    assert of(one, Division(channels=one)) == 2 * samples * outward * plane * 3 // 4
    assert of(one, Division(filters=one)) == 2 * samples * inward * plane * 3 // 4
    # Over 4 x 2 ranks 1/4 of the input over 2 ranks, and 1/2 of the output over 4.
    gathered, scattered = inward // 4 * plane // 2, outward // 2 * plane * 3 // 4
    assert of(both, Division(one, ("filter",))) == 2 * samples * (gathered + scattered)


@pytest.mark.parallel([4])
@pytest.mark.parametrize("sharded", [False, True])
def test_outputs_are_cut_over_the_axes_of_inputs_in_the_other_order_by_w(sharded: bool) -> None:
    grid = dc.ProcessGrid(channel=2, filter=-1)
    one, both = ("channel",), ("channel", "filter")
    x = torch.randn(2, 8, 6, 5)
    for algorithm, before, after in (
        ("x", both, both),
        ("y", both, both),
        ("w", both, both[::-1]),
        ("w", both[::-1], both),
        ("x", one, one),
        ("y", one, one),
        ("w", one, both[::-1]),
    ):
        layout = dc.Layout(channel=before)
        layer = layers.Conv2d(8, 8, 3, parallel=algorithm)
        dc.parallelize(layer, grid, layouts={"": layout}, shard_parameters=sharded)
        y = F.relu(layer(dc.distribute_tensor(x, grid, layout)))
        assert y.grid_layout == dc.Layout(channel=after)


@pytest.mark.parallel([2, 4])
def test_auto_takes_what_moves_least_and_explain_says_so() -> None:
    grid = dc.ProcessGrid(channel=-1)
    for inward, outward, kernel, taken in ((32, 8, 3, "x"), (8, 32, 3, "y"), (8, 8, 1, "x")):
        module = nn.Conv2d(inward, outward, kernel, padding=kernel // 2)
        (row,) = dc.explain(module, (2, inward, 6, 6), grid, show=False).layers
        (moved,) = row.redistributions
        assert moved.operator == f"conv2d, stationary-{taken}"
        assert row.layout == dc.Layout(channel="channel")
        x = dc.distribute_tensor(torch.randn(2, inward, 6, 6), grid)
        with trace_movements() as movements:
            assert module(x).grid_layout == row.layout
        assert [m.operator for m in movements if m.redistributes] == [moved.operator]
    module = layers.Conv2d(8, 32, 3, parallel="x")
    plan = dc.explain(module, (2, 8, 6, 6), {"channel": 2}, show=False)
    assert plan.layers[0].redistributions[0].operator == "conv2d, stationary-x"
    assert "by stationary-x" in str(plan)
    plan = dc.explain(nn.Conv2d(64, 64, 1), (2, 64, 6, 6), {"channel": 4, "filter": 4}, show=False)
    assert plan.layers[0].redistributions[0].operator == "conv2d, stationary-w"
    assert plan.layers[0].layout == dc.Layout(channel=("filter", "channel"))


PAIRS: list[tuple[type[nn.Module], type[nn.Module], tuple[Any, ...], tuple[int, ...]]] = [
    (layers.Conv1d, nn.Conv1d, (4, 6, 3), (2, 4, 9)),
    (layers.Conv2d, nn.Conv2d, (4, 6, 3), (2, 4, 9, 7)),
    (layers.Conv3d, nn.Conv3d, (4, 6, 3), (2, 4, 5, 6, 5)),
    (layers.ConvTranspose1d, nn.ConvTranspose1d, (4, 6, 3), (2, 4, 9)),
    (layers.ConvTranspose2d, nn.ConvTranspose2d, (4, 6, 3), (2, 4, 9, 7)),
    (layers.ConvTranspose3d, nn.ConvTranspose3d, (4, 6, 3), (2, 4, 5, 6, 5)),
    (layers.Linear, nn.Linear, (4, 6), (2, 4)),
]


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("ours, theirs, arguments, shape", PAIRS)
def test_layers_stand_in_for_those_of_torch(
    ours: Any, theirs: Any, arguments: tuple[Any, ...], shape: tuple[int, ...]
) -> None:
    grid = dc.ProcessGrid(channel=-1)
    torch.manual_seed(0)
    serial = theirs(*arguments).double()
    x = random_tensor(random.Random(0), shape)
    for algorithm in ALGORITHMS:
        layer = ours(*arguments, parallel=algorithm).double()
        layer.load_state_dict(serial.state_dict())
        assert isinstance(layer, theirs) and f"parallel={algorithm}" in repr(layer)
        assert torch.equal(layer(x), serial(x))
        y = layer(dc.distribute_tensor(x, grid))
        assert deviation(y.full_tensor().detach(), serial(x).detach()) <= TOLERANCE
        assert y.cuts[1] == (("channel",) if grid.size > 1 else ())
    assert channel_algorithms._CHOSEN.get() == "auto"
    with pytest.raises(ValueError, match="parallel='z' is unknown; choose from x, y, w, auto"):
        ours(*arguments, parallel="z")


@pytest.mark.parallel([2, 3])
def test_autocast_has_one_type_on_ranks_with_and_without_filters() -> None:
    grid = dc.ProcessGrid(channel=-1)
    x = dc.distribute_tensor(torch.randn(2, 1, 6, 6), grid)
    w = torch.randn(1, 1, 3, 3)
    for algorithm in ("x", "y"):
        with torch.autocast("cpu", torch.bfloat16):
            y = by(algorithm, F.conv2d)(x, w)
        assert set(MPI.COMM_WORLD.allgather(y.dtype)) == {torch.bfloat16}


@pytest.mark.parallel([2, 4])
def test_a_checkpoint_computes_again_on_ranks_without_filters_too() -> None:
    size = MPI.COMM_WORLD.size
    grid = dc.ProcessGrid(channel=-1)
    torch.manual_seed(0)
    serial = nn.Conv2d(size, size - 1, 3).double()
    serial.weight.requires_grad_(False)
    model = layers.Conv2d(size, size - 1, 3, parallel="y").double()
    model.load_state_dict(serial.state_dict())
    model.weight.requires_grad_(False)
    model = dc.parallelize(model, grid)
    x = torch.randn(2, size, 6, 5, dtype=torch.float64)
    serial(x).square().sum().backward()
    y = checkpoint(model, dc.distribute_tensor(x, grid), use_reentrant=False)
    y.square().sum().backward()
    assert deviation(model.bias.grad, serial.bias.grad) <= TOLERANCE
    assert len(set(MPI.COMM_WORLD.allgather(grid.transport.next_tag()))) == 1
