"""What is moved, changed or grown and then cut is what is cut of the serial sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import distconv as dc
from distconv.data import ChannelJitter, Crop, Dataset, Flip, HaloBlock, Noise, Rotate90, Translate
from distconv.data.views import OUTSIDE, View
from distconv.geometry.layout import Box
from tests.support.everywhere import WORLD, fails_everywhere
from tests.support.sample_files import FIELDS, X, Y
from tests.support.strategies import Case, on_any_grid

every_size = pytest.mark.parallel([1, 2, 4])
several = pytest.mark.parallel([2, 4])

SQUARES = np.arange(4 * 2 * 6 * 6, dtype=np.float64).reshape(4, 2, 6, 6)
LABELS = np.arange(4 * 6 * 6).reshape(4, 6, 6)
SMALL = {"x": SQUARES, "label": LABELS, "number": np.arange(4.0)}


# Views, against numpy


@st.composite
def moves(draw: st.DrawFn) -> tuple[View, np.ndarray, np.ndarray]:
    """A view, and the arrays that numpy makes by the same moves; OUTSIDE where they are filled."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    stored = np.arange(np.prod(shape)).reshape(shape)
    view, moved = View.of(shape), stored
    for kind in draw(
        st.lists(st.sampled_from(["flip", "swap", "roll", "shift", "crop"]), max_size=5)
    ):
        d = draw(st.integers(0, len(shape) - 1))
        n = moved.shape[d]
        if kind == "flip":
            view, moved = view.flipped(d), np.flip(moved, d)
        elif kind == "swap":
            e = draw(st.integers(0, len(shape) - 1))
            view, moved = view.swapped(d, e), np.swapaxes(moved, d, e)
        elif kind == "crop":
            start = draw(st.integers(0, n - 1))
            stop = draw(st.integers(start + 1, n))
            view = view.cropped(d, start, stop)
            moved = moved.take(range(start, stop), d)
        else:
            by = draw(st.integers(-n - 1, n + 1))
            view = view.moved(d, by, periodic=kind == "roll")
            if kind == "roll":
                moved = np.roll(moved, by, d)
            else:
                wide = np.pad(
                    moved,
                    [(n + 1, n + 1) if i == d else (0, 0) for i in range(len(shape))],
                    constant_values=OUTSIDE,
                )
                moved = wide.take(range(n + 1 - by, 2 * n + 1 - by), d)
    return view, stored, moved


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(start, tuple(draw(st.integers(a, n)) for a, n in zip(start, shape, strict=True)))


@given(st.data())
def test_any_box_of_a_view_is_made_of_boxes_of_the_stored_sample(data: st.DataObject) -> None:
    view, stored, moved = data.draw(moves())
    box = data.draw(boxes(view.shape))
    part = view.within(box)
    out = np.full(part.shape, OUTSIDE)
    for piece in part.pieces:
        piece.place(out, stored[piece.source.slices], part.order)
    assert np.array_equal(out, moved[box.slices])
    assert part.filled == any((p < 0).any() for p in part.positions)


@given(st.data())
def test_pieces_are_cut_where_the_stored_sample_is(data: st.DataObject) -> None:
    view, stored, moved = data.draw(moves())
    cut = tuple(data.draw(st.integers(0, n)) for n in stored.shape)
    out = np.full(view.shape, OUTSIDE)
    for piece in view.pieces:
        for corner in np.ndindex(*(2,) * stored.ndim):
            start = tuple(c if i else 0 for i, c in zip(corner, cut, strict=True))
            stop = tuple(n if i else c for i, c, n in zip(corner, cut, stored.shape, strict=True))
            part = piece.within(Box(start, stop), view.order)
            if part is not None:
                part.place(out, stored[part.source.slices], view.order)
    assert np.array_equal(out, moved)


@given(st.data())
def test_halos_are_those_of_a_padded_array(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    stored = np.arange(np.prod(shape)).reshape(shape)
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    stop = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True))
    halo = tuple(data.draw(st.integers(0, n)) for n in shape)
    pads = [(h, h) for h in halo]
    for border, padded in (
        ("zeros", np.pad(stored, pads, constant_values=OUTSIDE)),
        ("periodic", np.pad(stored, pads, mode="wrap")),
    ):
        expected = padded[
            tuple(slice(a, b + 2 * h) for a, b, h in zip(start, stop, halo, strict=True))
        ]
        view = View.of(shape).within(Box(start, stop), halo, border)
        out = np.full(view.shape, OUTSIDE)
        for piece in view.pieces:
            piece.place(out, stored[piece.source.slices], view.order)
        assert np.array_equal(out, expected)
    clipped = View.of(shape).within(Box(start, stop), halo)
    bounds = zip(start, stop, halo, shape, strict=True)
    expected = stored[tuple(slice(max(a - h, 0), min(b + h, n)) for a, b, h, n in bounds)]
    assert clipped.shape == expected.shape


# Augmentation, on grids


@pytest.mark.parametrize("quarters", range(4))
def test_rotations_are_those_of_numpy(quarters: int) -> None:
    class Fixed:
        """A generator that always draws the same."""

        def integers(self, *_: Any) -> int:
            return quarters

    view = Rotate90().view(View.of((2, 6, 6)), 2, Fixed())  # type: ignore[arg-type]
    out = np.zeros(view.shape)
    for piece in view.pieces:
        piece.place(out, SQUARES[0][piece.source.slices], view.order)
    assert np.array_equal(out, np.rot90(SQUARES[0], quarters, (1, 2)))


@on_any_grid(16)
def test_changed_samples_are_the_serial_ones_on_any_grid(case: Case) -> None:
    """Serially means on the grid of one rank, whose boxes are whole samples."""
    chosen: list[Any] = case.some(
        [
            Flip(),
            Flip(("width",), probability=1.0),
            Rotate90(),
            Crop((4, 4), case.one_of("random", "center")),
            Translate(case.draw(st.integers(0, 7)), case.one_of("periodic", "zeros")),
            ChannelJitter(0.2, 0.3),
            Noise(0.5),
            Noise(0.1, fields=("number",)),
        ]
    )
    options: dict[str, Any] = {
        "augment": chosen,
        "augment_seed": case.draw(st.integers(0, 3)),
        "dtype": torch.float64,
    }
    samples, epoch = [2, 0, 3], case.draw(st.integers(0, 3))
    serial = Dataset(SMALL, dc.ProcessGrid([WORLD.rank]), **options).batch(samples, epoch)
    layout = case.layout(serial[0].shape)
    for made, x in zip(
        Dataset(SMALL, case.grid, layout=layout, **options).batch(samples, epoch),
        serial,
        strict=True,
    ):
        assert torch.equal(made.full_tensor(), x.to_local())


def test_all_fields_in_space_are_moved_alike_and_each_sample_and_epoch_otherwise() -> None:
    chosen = [Translate(5, "periodic"), Flip(), Rotate90(), Crop((5, 4))]
    data = Dataset(SMALL, dc.ProcessGrid(), augment=chosen)
    seen = set()
    for epoch in range(3):
        x, label, number = (t.to_local().numpy() for t in data.batch(range(4), epoch))
        assert x.shape == (4, 2, 5, 4) and np.array_equal(number, range(4))
        for i in range(4):
            # Channel 0 of sample i begins with 72 i, its labels with 36 i.
            assert np.array_equal(x[i, 0] - 72 * i, label[i] - 36 * i)
            seen.add(tuple((label[i] - 36 * i).ravel()))
        again = data.batch(range(4), epoch)[1].to_local().numpy()
        assert np.array_equal(again, label)
    assert len(seen) == 12


def test_zeros_at_the_border_are_zeros_of_the_tensor_and_get_no_noise() -> None:
    scale = dc.data.Normalize([5.0, 7.0], [2.0, 3.0])
    chosen = [Translate(6, "zeros"), Noise(1.0)]
    data = Dataset({"x": SQUARES}, dc.ProcessGrid(), transform={"x": scale}, augment=chosen)
    blocks = data.batch(range(4)).to_local()
    zeros = blocks == 0
    assert zeros.any() and not zeros.all()
    assert torch.equal(zeros[:, 0], zeros[:, 1])  # in all channels, and nowhere else


def test_noise_and_jitter_have_the_size_that_was_asked_for() -> None:
    zeros = np.zeros((1, 3, 60, 70))
    noise = Dataset(zeros, dc.ProcessGrid(), augment=[Noise(2.0)]).batch([0]).to_local()
    assert abs(noise.mean()) < 0.1 and abs(noise.std() - 2) < 0.1
    ones = Dataset(zeros + 1, dc.ProcessGrid(), augment=[ChannelJitter(0.3, 0.2)])
    channels = ones.batch([0]).to_local()
    assert channels.std((2, 3)).max() < 1e-6 and len(channels.mean((2, 3)).unique()) == 3
    assert 0.5 <= channels.min() and channels.max() <= 1.5


@several
def test_a_rank_reads_no_more_than_it_needs_when_samples_are_cropped() -> None:
    data = Dataset(SQUARES, dc.ProcessGrid(height=-1), augment=[Crop((4, 4)), Rotate90()])
    data.batch([0, 1, 2])
    assert WORLD.allreduce(data.bytes_read) == 3 * 2 * 4 * 4 * 8


@several
def test_changes_of_a_program_are_done_like_those_of_the_library() -> None:
    class Transpose(dc.data.Move):
        def view(self, view: View, space: int, generator: Any) -> View:
            return view.swapped(-1, -2)

    class Negate(dc.data.Change):
        def apply(self, block: Any, box: Box, shape: Any, generator: Any) -> Any:
            return -block

    data = Dataset(SMALL, dc.ProcessGrid(height=-1), augment=[Transpose(), Negate()])
    x, label, _ = data.batch([2])
    assert np.array_equal(x.full_tensor(), -SQUARES[[2]].swapaxes(2, 3))
    assert np.array_equal(label.full_tensor(), LABELS[[2]].swapaxes(1, 2))


WRONG: dict[str, tuple[Any, Any, str]] = {
    "no augmentation": (X, "flip", "'flip' changes no samples"),
    "dimension": (X, Flip(("depth",)), "no dimension .'depth'.; choose from .'height', 'width'."),
    "probability": (X, Flip(probability=2), "is out of range"),
    "plane": (X, Rotate90(), "has the unequal extents .6, 7."),
    "one dimension": (X, Rotate90(("width", "width")), "expected two different"),
    "crop": (X, Crop((7, 7)), "does not fit samples of .6, 7."),
    "where": (X, Crop((2, 2), "left"), "where='left'"),
    "border": (X, Translate(1, "mirror"), "border='mirror'"),
    "distance": (X, Translate((1, 2, 3)), "distance of 0 or more"),
    "no space": ({"z": X[:, 0, 0, 0]}, Flip(), "have no spatial dimensions"),
    "integers": (Y, Noise(1.0), "type torch.int64; expected a floating-point"),
    "field": ({"x": X}, Noise(1.0, fields=("y",)), r"augment= names \['y'\]"),
}


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_done_to_samples_is_one_error_on_all_ranks(kind: str) -> None:
    source, one, message = WRONG[kind]
    grid = dc.ProcessGrid(sample=-1)
    fails_everywhere(lambda: Dataset(source, grid, augment=[one]), message)


# Halos


@on_any_grid(12)
def test_boxes_come_with_their_halos(case: Case) -> None:
    layout = case.layout((3, 3, 6, 7))
    halo = case.one_of(1, (2, 1), (0, 3))
    border = case.one_of("clip", "zeros", "periodic")
    options: dict[str, Any] = {"layout": layout, "halo": halo, "halo_border": border}
    x, y, z = Dataset(FIELDS, case.grid, **options).batch([4, 0, 1])
    assert isinstance(x, HaloBlock) and isinstance(y, HaloBlock) and z.shape == (3,)
    own = dc.local_box((3, 3, 6, 7), case.grid, layout)
    whole = X[[4, 0, 1]]
    assert x.own == own and x.shape == (3, 3, 6, 7)
    assert np.array_equal(x.local[x.inner], whole[own.slices])
    assert x.local.shape == x.box.shape
    h, w = (halo, halo) if isinstance(halo, int) else halo
    pads = ((0, 0), (0, 0), (h, h), (w, w))
    padded = np.pad(whole, pads, mode="wrap" if border == "periodic" else "constant")
    places = zip(x.box.start, x.box.stop, (0, 0, h, w), strict=True)
    if own.size:
        assert np.array_equal(x.local, padded[tuple(slice(a + s, b + s) for a, b, s in places)])
        reach = [b - a for a, b in zip(own.start, own.stop, strict=True)]
        if border != "clip":
            assert x.local.shape == (*reach[:2], reach[2] + 2 * h, reach[3] + 2 * w)
        else:
            assert min(x.box.start) >= 0 and all(np.less_equal(x.box.stop, x.shape))


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"halo": -1}, "halo=-1 of .*expected one extent of 0 or more"),
        ({"halo": (1, 1, 1)}, "all 2 spatial dimensions"),
        ({"halo": {"z": 1}}, "all 0 spatial dimensions"),
        ({"halo": {"w": 1}}, r"halo= names \['w'\]"),
        ({"halo": 1, "halo_border": "mirror"}, "choose one of clip, zeros, periodic"),
        ({"halo": 7, "halo_border": "periodic"}, "larger than the samples"),
    ],
)
def test_halos_that_there_are_not_are_one_error_on_all_ranks(
    options: dict[str, Any], message: str
) -> None:
    grid = dc.ProcessGrid(width=-1)
    fails_everywhere(lambda: Dataset(FIELDS, grid, **options), message)
