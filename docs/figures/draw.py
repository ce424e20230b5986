"""Draw the figures of README and site from the library's own plans.

`python -m docs.figures.draw` writes them beside this file.
"""

# ruff: noqa: E501 - words of figures stand on lines of their own

from __future__ import annotations

from itertools import product
from pathlib import Path

from distconv.geometry.index_maps import IndexMap, Same, Window
from distconv.geometry.layout import Cuts, rank_box
from distconv.geometry.plan import Plan, make_plan
from distconv.geometry.topology import AXES, Topology
from docs.figures.canvas import RANKS, Canvas

FOLDER = Path(__file__).parent


def topology(**extents: int) -> Topology:
    """Return the topology of a grid with these extents."""
    return Topology(tuple(extents.get(axis, 1) for axis in AXES))


def owners(plan: Plan, rank: int) -> dict[tuple[int, ...], int]:
    """Return the rank that holds each place of a rank's buffer; padding has none."""
    found = {}
    boxes = [(rank, target) for _, target in plan.own]
    boxes += [(route.peer, box) for route in plan.receives for box in route.boxes]
    for owner, box in boxes:
        for place in product(*(range(s.start, s.stop) for s in box)):
            found[place] = owner
    return found


def sample_cut() -> Canvas:
    """Draw one sample cut over four ranks, and what each holds and receives for a convolution."""
    grid, size, cell = topology(height=2, width=2), 11, 13
    shape, cuts = (size, size), (("height",), ("width",))
    window = Window(kernel=3, padding=(1, 1))
    drawing = Canvas(
        760, 372, "One sample cut over four ranks, with the halos of a 3x3 convolution"
    )
    drawing.text(24, 34, "One sample, 11 x 11", "title")
    for rank in range(4):
        box = rank_box(shape, cuts, grid, rank)
        for i, j in product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))):
            drawing.rect(40 + j * 17, 84 + i * 17, 17, 17, fill=RANKS[rank])
        middle = [(a + b) / 2 * 17 for a, b in zip(box.start, box.stop, strict=True)]
        x, y = 40 + middle[1], 84 + middle[0] + 5
        drawing.text(x, y, f"rank {rank}", "on", "middle", on=RANKS[rank])
    drawing.text(24, 54, "ProcessGrid(height=2, width=2)", "small mono quiet")
    drawing.text(24, 306, "Each rank holds one block of it.", "small")
    drawing.line(248, 178, 292, 178, tip=True)
    drawing.text(312, 34, "Elements that each rank needs for a 3x3 convolution", "title")
    for rank in range(4):
        plan = make_plan(grid, rank, shape, cuts, cuts, (window, window))
        held = owners(plan, rank)
        i, j = divmod(rank, 2)
        left, top = 320 + j * 200, 62 + i * 126
        for place in product(*map(range, plan.buffer_shape)):
            x, y = left + place[1] * cell, top + place[0] * cell
            if place in held:
                own = held[place] == rank
                drawing.rect(
                    x, y, cell, cell, fill=RANKS[held[place]], fill_opacity="1" if own else ".75"
                )
            else:
                drawing.rect(x, y, cell, cell, "padding")
        ((_, own_box),) = plan.own
        rows, columns = own_box
        drawing.rect(
            left + columns.start * cell,
            top + rows.start * cell,
            (columns.stop - columns.start) * cell,
            (rows.stop - rows.start) * cell,
            "frame",
        )
        received = sum(route.size for route in plan.receives)
        drawing.text(left + 112, top + 20, f"rank {rank}", "small")
        drawing.text(left + 112, top + 36, f"holds {len(held) - received}", "small quiet")
        drawing.text(left + 112, top + 52, f"receives {received}", "small quiet")
    drawing.rect(320, 326, 14, 14, "frame")
    drawing.text(341, 338, "its own block", "small")
    drawing.rect(430, 326, 14, 14, fill=RANKS[1])
    drawing.text(451, 338, "halo: another rank's elements", "small")
    drawing.rect(640, 326, 14, 14, "padding")
    drawing.text(661, 338, "padding", "small")
    return drawing


def ranks_as_a_grid() -> Canvas:
    """Draw eight ranks as a grid of two samples, each cut in four."""
    grid = topology(sample=2, height=2, width=2)
    drawing = Canvas(760, 300, "Eight ranks as a grid: two groups of four, each shares samples")
    drawing.text(24, 34, "ProcessGrid(sample=2, height=2, width=2): P_N = 2, P_S = 4", "title")
    shape, cuts = (4, 10, 12), (("sample",), ("height",), ("width",))
    for replica in range(2):
        left = 40 + replica * 370
        drawing.rect(left - 16, 54, 340, 206, "box", rx="8")
        ranks = [r for r in range(8) if grid.coordinates(r)["sample"] == replica]
        samples = rank_box(shape, cuts, grid, ranks[0]).slices[0]
        drawing.text(
            left,
            78,
            f"replica {replica}: samples {samples.start} and {samples.stop - 1} of 4",
            "small",
        )
        for back in (1, 0):
            for rank in ranks:
                box = rank_box(shape, cuts, grid, rank)
                (h0, h1), (w0, w1) = list(zip(box.start, box.stop, strict=True))[1:]
                x, y = left + 12 + w0 * 23 + back * 26, 118 + h0 * 13 - back * 22
                opacity = "0.45" if back else "1"
                drawing.rect(
                    x, y, (w1 - w0) * 23, (h1 - h0) * 13, fill=RANKS[rank], fill_opacity=opacity
                )
                if not back:
                    where = grid.coordinates(rank)
                    drawing.text(x + 69, y + 30, f"rank {rank}", "on", "middle")
                    place = f"height {where['height']}, width {where['width']}"
                    drawing.text(x + 69, y + 48, place, "on small", "middle")
    drawing.text(
        24,
        282,
        "The ranks of a sample are neighbours in rank order, so a launcher puts them on one node.",
        "small quiet",
    )
    return drawing


def strided_convolution() -> Canvas:
    """Draw the halos of a strided convolution on uneven blocks along one dimension."""
    grid, size = topology(height=3), 14
    cuts: Cuts = (("height",),)
    window = Window(kernel=5, stride=2, padding=(2, 2))
    outputs, cell = window.output_size(size), 34
    drawing = Canvas(
        760, 392, "Halos of a convolution with kernel 5 and stride 2 on 14 rows over 3 ranks"
    )
    drawing.text(
        24, 34, f"Kernel 5, stride 2, padding 2: {size} rows over 3 ranks become {outputs}", "title"
    )

    def place(i: float) -> float:
        return 118 + (i + 2) * cell

    drawing.text(24, 84, "input", "small")
    drawing.text(24, 154, "output", "small")
    for i in (-2, -1, size, size + 1):
        drawing.rect(place(i), 64, cell, 30, "padding")
    for rank in range(3):
        box = rank_box((size,), cuts, grid, rank)
        for i in range(box.start[0], box.stop[0]):
            drawing.rect(place(i), 64, cell, 30, fill=RANKS[rank])
            drawing.text(place(i) + cell / 2, 84, str(i), "on small", "middle")
        box = rank_box((outputs,), cuts, grid, rank)
        for o in range(box.start[0], box.stop[0]):
            middle = place(2 * o) + cell / 2
            drawing.rect(place(2 * o), 134, cell, 30, fill=RANKS[rank])
            drawing.text(middle, 154, str(o), "on small", "middle")
            drawing.line(place(2 * o - 2) + 4, 97, middle, 133, opacity="0.6")
            drawing.line(place(2 * o + 3) - 4, 97, middle, 133, opacity="0.6")
    drawing.text(24, 204, "What each rank needs for its outputs, and from whom:", "small")
    for rank in range(3):
        y = 218 + rank * 48
        plan = make_plan(grid, rank, (size,), cuts, cuts, (window,))
        ((first, _),) = window.intervals(size, *_bounds(outputs, cuts, grid, rank))
        held = owners(plan, rank)
        drawing.text(24, y + 20, f"rank {rank}", "small")
        for k in range(plan.buffer_shape[0]):
            owner = held.get((k,))
            if owner is None:
                drawing.rect(place(first + k), y, cell, 30, "padding")
            else:
                drawing.rect(place(first + k), y, cell, 30, fill=RANKS[owner])
                drawing.text(
                    place(first + k) + cell / 2, y + 20, str(first + k), "on small", "middle"
                )
        ((_, (own,)),) = plan.own
        drawing.rect(place(first + own.start), y, cell * (own.stop - own.start), 30, "frame")
    drawing.text(
        24,
        378,
        "Framed: the rank's own rows. Other colours are halos, which differ from side to side; grey is padding.",
        "small quiet",
    )
    return drawing


def _bounds(size: int, cuts: Cuts, grid: Topology, rank: int) -> tuple[int, int]:
    box = rank_box((size,), cuts, grid, rank)
    return box.start[0], box.stop[0]


def redistribution() -> Canvas:
    """Draw a tensor that goes from a cut of rows to a cut of channels, and its messages."""
    grid, shape, cell = topology(height=4), (8, 8), 22
    rows: Cuts = ((), ("height",))
    channels: Cuts = (("height",), ())
    needs: tuple[IndexMap, ...] = (Same(), Same())
    drawing = Canvas(760, 330, "A tensor goes from a cut of its rows to a cut of its channels")
    for left, title, cuts in (
        (60, 'Layout(height="height")', rows),
        (524, 'Layout(channel="height")', channels),
    ):
        drawing.text(left, 34, title, "mono small")
        for rank in range(4):
            box = rank_box(shape, cuts, grid, rank)
            for c, h in product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))):
                drawing.rect(left + c * cell, 62 + h * cell, cell, cell, fill=RANKS[rank])
            x = left + (box.start[0] + box.stop[0]) / 2 * cell
            y = 62 + (box.start[1] + box.stop[1]) / 2 * cell
            words = f"rank {rank}" if cuts == rows else str(rank)
            drawing.text(x, y + 5, words, "on", "middle", on=RANKS[rank])
        drawing.text(left + 4 * cell, 258, "channels", "small quiet", "middle")
        drawing.text(left - 8, 156, "rows", "small quiet", "end")
    drawing.line(252, 150, 478, 150, tip=True)
    plan = make_plan(grid, 1, shape, rows, channels, needs)
    drawing.text(365, 100, "x.redistribute(layout)", "mono small", "middle")
    drawing.text(365, 176, "rank 1 keeps 4 elements", "small", "middle")
    sends = ", ".join(f"{route.size} to rank {route.peer}" for route in plan.sends)
    drawing.text(365, 196, "and sends", "small", "middle")
    drawing.text(365, 214, sends, "small", "middle")
    drawing.text(
        24,
        300,
        "Every element moves once, straight to its new owner. The gradient goes the same way back.",
        "small quiet",
    )
    return drawing


def replicas_and_gradients() -> Canvas:
    """Draw the parts of a parameter's gradient, and their sum."""
    grid = topology(sample=2, height=2)
    drawing = Canvas(
        760, 326, "Each rank's part of a weight's gradient, and the sum over the ranks"
    )
    drawing.text(24, 34, "A weight on ProcessGrid(sample=2, height=2)", "title")
    for rank in range(4):
        where = grid.coordinates(rank)
        x = 30 + rank * 180
        drawing.rect(x, 54, 160, 62, "cell", RANKS[rank], rx="6")
        drawing.text(x + 80, 80, f"rank {rank}", "on", "middle")
        part = ("upper", "lower")[where["height"]]
        drawing.text(x + 80, 100, f"sample {where['sample']}, {part} half", "on small", "middle")
        drawing.text(x + 80, 138, f"its contribution: g{rank}", "small", "middle")
        drawing.line(x + 80, 146, x + 80, 178, tip=True)
    drawing.rect(30, 182, 700, 40, "box", rx="6")
    drawing.text(380, 207, "one all-reduce: g0 + g1 + g2 + g3 = the serial gradient", "", "middle")
    for rank in range(4):
        x = 30 + rank * 180
        drawing.line(x + 80, 224, x + 80, 248, tip=True)
        drawing.text(x + 80, 266, "w.grad", "mono", "middle")
    drawing.text(
        24,
        304,
        "It starts while the backward pass goes on, a bucket of parameters at a time, and is done when backward() returns.",
        "small quiet",
    )
    return drawing


def overlap() -> Canvas:
    """Draw the work of a rank during a convolution, beside its messages."""
    drawing = Canvas(760, 346, "Computation and messages of one rank in a partitioned convolution")
    drawing.text(
        24,
        34,
        "One rank in a partitioned convolution and its backward pass (not to scale)",
        "title",
    )
    rows = {
        "computes": (
            70,
            [
                (110, 40, "post", 7),
                (152, 150, "own block", 0),
                (304, 70, "add halo", 1),
                (390, 84, "halo outputs", 1),
                (476, 176, "own block and weight", 0),
                (654, 44, "add", 1),
            ],
        ),
        "halos": (122, [(130, 168, "halo of x", 2), (476, 160, "gradient of the halo", 2)]),
        "gradients": (174, [(654, 84, "all-reduce", 6)]),
    }
    for name, (y, bars) in rows.items():
        drawing.text(24, y + 22, name, "small")
        for x, width, words, colour in bars:
            drawing.rect(x, y, width, 34, "cell", RANKS[colour], rx="4")
            drawing.text(x + width / 2, y + 22, words, "on small", "middle")
    drawing.line(380, 52, 380, 218, stroke_dasharray="4 4")
    drawing.text(372, 236, "forward", "small quiet", "end")
    drawing.text(388, 236, "backward", "small quiet")
    lines = (
        "Forward: the rank posts receives, computes on its own block, and adds the contributions of the halo.",
        "Backward: the gradient of the halo is computed first and sent to its owner while the rank computes the",
        "gradients of its own block and of the weight. All-reduces of weight gradients overlap the next layers.",
    )
    for i, words in enumerate(lines):
        drawing.text(24, 270 + i * 20, words, "small")
    return drawing


def floors() -> Canvas:
    """Draw the folders of the library, each on those that it imports."""
    drawing = Canvas(760, 503, "The folders of distconv as floors; imports point down only")
    drawing.text(24, 34, "Imports point down only", "title")
    for i, (names, what) in enumerate(
        (
            ("tools", "explain, verify, timelines, the command line"),
            ("planning", "machine model, predictions, the search for a grid"),
            ("training, horovod, lbann", "algorithms that depend on the number of replicas"),
            ("data", "reading and writing samples block by block, checkpoints"),
            ("layers", "drop-in layers with a choice"),
            ("compiling", "programs that are traced with their messages, and replayed"),
            ("model", "parallelize: gradients, sharding, layouts of modules"),
            ("ops", "the rule of each torch function, a folder for each family"),
            ("tensor", "DistTensor and its strict dispatch"),
            ("comm", "plans in motion, with their adjoints"),
            ("grid", "the ranks as a grid; finds ranks that differ or stall"),
            ("transport", "bytes between ranks: MPI, torch.distributed, NCCL"),
            ("geometry", "index arithmetic, without torch and MPI"),
        )
    ):
        y = 52 + i * 33
        drawing.rect(24, y, 712, 29, "box", rx="4")
        drawing.text(40, y + 19, names, "mono")
        drawing.text(230, y + 19, what, "small")
    return drawing


FIGURES = (
    *(sample_cut, ranks_as_a_grid, strided_convolution, redistribution),
    *(replicas_and_gradients, overlap, floors),
)

if __name__ == "__main__":
    for figure in FIGURES:
        figure().save(FOLDER / f"{figure.__name__}.svg")
