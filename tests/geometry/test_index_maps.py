"""The inputs that an interval of outputs needs are the inputs that torch's operators read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from distconv.geometry.index_maps import (
    AdaptiveWindow,
    Grouped,
    IndexMap,
    Interval,
    Pad,
    Rows,
    Same,
    Strided,
    TransposedWindow,
    Window,
    WrittenSlice,
)

sizes = st.integers(1, 25)


@st.composite
def spans(draw: st.DrawFn, outputs: int) -> Interval:
    """Draw a non-empty interval of outputs."""
    assume(outputs > 0)
    start = draw(st.integers(0, outputs - 1))
    return start, draw(st.integers(start + 1, outputs))


def hull(positions: list[int]) -> tuple[Interval, ...]:
    return ((min(positions), max(positions) + 1),)


def taken(index_map: IndexMap, size: int, start: int, stop: int) -> list[int]:
    """Return the positions of the needed buffer, in order."""
    return [i for a, b in index_map.intervals(size, start, stop) for i in range(a, b)]


def read_by(function, size: int, start: int, stop: int) -> list[int]:
    """Return the inputs on which the outputs [start, stop) of a torch function depend."""
    x = torch.ones(1, 1, size, dtype=torch.float64, requires_grad=True)
    function(x)[..., start:stop].sum().backward()
    return x.grad.flatten().nonzero().flatten().tolist()


@given(sizes, st.data())
def test_same_needs_what_it_makes(size: int, data: st.DataObject) -> None:
    start, stop = data.draw(spans(size))
    assert Same().output_size(size) == size
    assert Same().intervals(size, start, stop) == ((start, stop),)


@given(sizes, st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(0, 5), st.data())
def test_a_window_is_a_convolution(
    size: int, kernel: int, stride: int, dilation: int, padding: int, data: st.DataObject
) -> None:
    window = Window(kernel, stride, dilation, (padding, padding))
    assume(size + 2 * padding >= window.extent)
    weight = torch.ones(1, 1, kernel, dtype=torch.float64)

    def convolution(x: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x, weight, None, stride, padding, dilation)

    outputs = window.output_size(size)
    assert outputs == convolution(torch.zeros(1, 1, size, dtype=torch.float64)).shape[-1]
    start, stop = data.draw(spans(outputs))
    covered = [
        o * stride - padding + dilation * i for o in range(start, stop) for i in range(kernel)
    ]
    assert window.intervals(size, start, stop) == hull(covered)
    inside = sorted({i for i in covered if 0 <= i < size})
    assert read_by(convolution, size, start, stop) == inside


@given(sizes, st.integers(1, 6), st.integers(1, 3), st.integers(0, 5), st.integers(0, 5))
def test_a_window_may_be_padded_differently_on_its_two_sides(
    size: int, kernel: int, stride: int, before: int, after: int
) -> None:
    assume(size + before + after >= kernel)
    window = Window(kernel, stride, 1, (before, after))
    padded = F.pad(torch.zeros(1, 1, size), (before, after))
    assert window.output_size(size) == padded.unfold(-1, kernel, stride).shape[-2]
    assert window.intervals(size, 0, 1) == ((-before, kernel - before),)


@given(sizes, st.integers(1, 6), st.integers(1, 5), st.integers(1, 3), st.data())
def test_a_window_of_ceil_mode_is_a_pooling(
    size: int, kernel: int, stride: int, dilation: int, data: st.DataObject
) -> None:
    padding = data.draw(st.integers(0, kernel // 2))
    window = Window(kernel, stride, dilation, (padding, padding), ceil_mode=True)
    assume(size + 2 * padding + stride - 1 >= window.extent)
    pooled = F.max_pool1d(
        torch.zeros(1, 1, size), kernel, stride, padding, dilation, ceil_mode=True
    )
    assert window.output_size(size) == pooled.shape[-1]


@given(sizes, st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(0, 5), st.data())
def test_a_transposed_window_is_a_transposed_convolution(
    size: int, kernel: int, stride: int, dilation: int, padding: int, data: st.DataObject
) -> None:
    more = data.draw(st.integers(0, max(stride, dilation) - 1))
    window = TransposedWindow(kernel, stride, dilation, padding, more)
    assume(window.output_size(size) > 0)
    weight = torch.ones(1, 1, kernel, dtype=torch.float64)

    def convolution(x: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose1d(x, weight, None, stride, padding, more, 1, dilation)

    outputs = convolution(torch.zeros(1, 1, size, dtype=torch.float64)).shape[-1]
    assert window.output_size(size) == outputs
    start, stop = data.draw(spans(outputs))
    inputs = taken(window, size, start, stop)
    assert set(read_by(convolution, size, start, stop)) <= set(inputs)
    extent = dilation * (kernel - 1)
    reaching = [
        i
        for i in range(-outputs - 30, outputs + 30)
        if start <= i * stride - padding + extent and i * stride - padding < stop
    ]
    # Outputs between two windows take from none; the buffer then starts at the one before.
    assert inputs in (reaching, [inputs[0], *reaching])
    first, last = inputs[0] * stride - padding, inputs[-1] * stride - padding + extent + 1
    assert window.written(size, start, stop) == (first, last) and first <= start


@given(sizes, st.integers(1, 30), st.data())
def test_an_adaptive_window_reads_what_adaptive_pooling_reads(
    size: int, outputs: int, data: st.DataObject
) -> None:
    window = AdaptiveWindow(outputs)
    start, stop = data.draw(spans(outputs))
    assert window.output_size(size) == outputs
    read = read_by(lambda x: F.adaptive_avg_pool1d(x, outputs), size, start, stop)
    assert taken(window, size, start, stop) == read
    only = read_by(lambda x: F.adaptive_avg_pool1d(x, outputs), size, start, start + 1)
    assert list(range(*window.window(size, start))) == only


@given(sizes, st.integers(1, 30), st.data())
def test_runs_of_adaptive_windows_make_the_outputs_of_a_block(
    size: int, outputs: int, data: st.DataObject
) -> None:
    window, x = AdaptiveWindow(outputs), torch.randn(1, 1, size, dtype=torch.float64)
    start, stop = data.draw(spans(outputs))
    ((first, last),) = window.intervals(size, start, stop)
    runs = window.runs(size, start, stop)
    buffer = x[..., first:last]
    made = [F.adaptive_avg_pool1d(buffer[..., r.start : r.stop], r.outputs) for r in runs]
    torch.testing.assert_close(
        torch.cat(made, 2), F.adaptive_avg_pool1d(x, outputs)[..., start:stop]
    )
    if size % outputs == 0:
        assert len(runs) == 1


@given(sizes, st.integers(0, 24), st.integers(1, 5), st.data())
def test_a_strided_map_is_a_slice(size: int, first: int, step: int, data: st.DataObject) -> None:
    positions = range(size)[first::step]
    start, stop = data.draw(spans(len(positions)))
    strided = Strided(first, step, len(positions))
    assert strided.output_size(size) == len(positions)
    assert taken(strided, size, start, stop)[::step] == list(positions[start:stop])
    assert strided.intervals(size, start, stop) == hull(list(positions[start:stop]))


@given(sizes, st.integers(0, 10), st.integers(0, 10), st.data())
def test_a_span_is_one_operand_of_a_concatenation(
    size: int, before: int, after: int, data: st.DataObject
) -> None:
    joined = [None] * before + list(range(size)) + [None] * after
    span = WrittenSlice(before, len(joined))
    start, stop = data.draw(spans(len(joined)))
    assert span.output_size(size) == len(joined)
    assert taken(span, size, start, stop) == [i for i in joined[start:stop] if i is not None]


@given(sizes, st.integers(1, 5), st.data())
def test_a_grouped_map_repeats_every_input(size: int, factor: int, data: st.DataObject) -> None:
    repeated = np.repeat(np.arange(size), factor)
    start, stop = data.draw(spans(len(repeated)))
    assert Grouped(factor).output_size(size) == len(repeated)
    assert taken(Grouped(factor), size, start, stop) == sorted(set(repeated[start:stop].tolist()))


@given(sizes, st.integers(1, 9), st.data())
def test_rows_of_another_length_take_the_rows_that_hold_their_elements(
    size: int, before: int, data: st.DataObject
) -> None:
    elements = size * before
    after = data.draw(st.sampled_from([n for n in range(1, 100) if elements % n == 0]))
    start, stop = data.draw(spans(elements // after))
    row_of = np.arange(elements) // before
    rows = Rows(before, after)
    assert rows.output_size(size) == elements // after
    assert (
        taken(rows, size, start, stop) == np.unique(row_of[start * after : stop * after]).tolist()
    )
    assert rows.offset(start) == start * after - row_of[start * after] * before


@given(sizes, st.integers(-6, 12), st.integers(-6, 12), st.data())
def test_constant_padding_leaves_the_outside_to_the_fill(
    size: int, before: int, after: int, data: st.DataObject
) -> None:
    pad = Pad(before, after)
    padded = (
        F.pad(torch.arange(size), (before, after), value=-1).tolist()
        if (size + before + after > 0 and -before < size and -after < size)
        else []
    )
    start, stop = data.draw(spans(len(padded)))
    assert pad.output_size(size) == len(padded)
    buffer = taken(pad, size, start, stop)
    assert [i if 0 <= i < size else -1 for i in buffer] == padded[start:stop]
    assert pad.order(size, start, stop) is None


@given(
    sizes,
    st.sampled_from(["reflect", "replicate", "circular"]),
    st.integers(-6, 25),
    st.integers(-6, 25),
    st.data(),
)
def test_padding_modes_repeat_the_inputs_that_torch_repeats(
    size: int, mode: str, before: int, after: int, data: st.DataObject
) -> None:
    # Where all inputs are cropped, torch wraps around memory that nobody has written.
    assume(mode != "circular" or max(-before, 0) < size + min(after, 0))
    index = torch.arange(size, dtype=torch.float64).reshape(1, 1, size)
    try:
        padded = F.pad(index, (before, after), mode).flatten().int().tolist()
    except RuntimeError:
        assume(False)
    pad = Pad(before, after, mode)
    assert pad.output_size(size) == len(padded)
    start, stop = data.draw(spans(len(padded)))
    buffer = taken(pad, size, start, stop)
    order = pad.order(size, start, stop)
    assert [buffer[i] for i in order or range(len(buffer))] == padded[start:stop]
    assert all(0 <= i < size for i in buffer)
    outside = pad.outside(size, start, stop)
    if outside is not None:
        within = torch.tensor(buffer, dtype=torch.float64).reshape(1, 1, -1)
        assert F.pad(within, outside, mode).flatten().tolist() == padded[start:stop]


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_blocks_that_hold_what_their_padding_repeats_are_padded_alone(mode: str) -> None:
    pad = Pad(2, 3, mode)
    assert pad.outside(10, 0, 8) == (2, 0)
    assert pad.outside(10, 8, 15) == (0, 3)
    assert pad.outside(10, 3, 12) == (0, 0)


@pytest.mark.parametrize(("before", "after", "left"), [(3, -2, 0), (-1, 2, 1), (-1, -1, 0)])
def test_circular_padding_by_more_than_is_left_is_an_error(
    before: int, after: int, left: int
) -> None:
    with pytest.raises(RuntimeError, match=f"leaves {left} of 2 positions to wrap around"):
        Pad(before, after, "circular").output_size(2)
