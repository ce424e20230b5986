"""Blocks, boxes and ranks follow from shape, layout and grid alone."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distconv import layout
from distconv.geometry.layout import (
    Box,
    Layout,
    block,
    cuts_of_broadcast,
    cutting_axes,
    default_cuts,
    dimension_names,
    effective_cuts,
    owning_part,
    rank_box,
    replicating_axes,
)
from distconv.geometry.topology import AXES, Topology
from tests.support.geometry import cuts_of, topologies

sizes = st.integers(0, 40)
counts = st.integers(1, 12)


@given(sizes, counts)
def test_canonical_blocks_cover_in_order_and_the_first_ones_are_longer(n: int, parts: int) -> None:
    blocks = [block(n, parts, i) for i in range(parts)]
    assert [i for start, stop in blocks for i in range(start, stop)] == list(range(n))
    lengths = [stop - start for start, stop in blocks]
    assert lengths == [n // parts + 1] * (n % parts) + [n // parts] * (parts - n % parts)


@given(sizes, counts)
def test_owner_is_the_inverse_of_block(n: int, parts: int) -> None:
    for i in range(parts):
        start, stop = block(n, parts, i)
        assert all(owning_part(n, parts, position) == i for position in range(start, stop))


@given(topologies())
def test_ranks_and_coordinates_are_inverse_and_width_varies_fastest(topology: Topology) -> None:
    places = np.arange(topology.size).reshape(topology.extents)
    for index, rank in np.ndenumerate(places):
        coordinates = dict(zip(AXES, index, strict=True))
        assert topology.coordinates(int(rank)) == coordinates
        assert topology.rank(coordinates) == rank


@given(topologies(), st.data())
def test_part_and_unravel_are_inverse_with_the_first_axis_slowest(
    topology: Topology, data: st.DataObject
) -> None:
    axes = tuple(data.draw(st.lists(st.sampled_from(AXES), unique=True)))
    for part in range(topology.parts(axes)):
        coordinates = topology.unravel(part, axes)
        assert topology.part(coordinates, axes) == part
        expected = np.unravel_index(part, [topology.extent(a) for a in axes]) if axes else ()
        assert tuple(coordinates[a] for a in axes) == tuple(map(int, expected))


@given(topologies(), st.data())
def test_peers_differ_along_the_given_axes_only(topology: Topology, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(AXES), unique=True))
    rank = data.draw(st.integers(0, topology.size - 1))
    here = topology.coordinates(rank)
    assert topology.peers(rank, axes) == tuple(
        r
        for r in range(topology.size)
        if all(topology.coordinate(r, a) == here[a] for a in AXES if a not in axes)
    )


@given(topologies(), st.lists(st.integers(0, 7), max_size=5), st.data())
def test_the_boxes_of_all_ranks_tile_the_tensor_once_per_replica(
    topology: Topology, shape: list[int], data: st.DataObject
) -> None:
    cuts = data.draw(cuts_of(topology, len(shape)))
    held = np.zeros(shape, int)
    for rank in range(topology.size):
        box = rank_box(tuple(shape), cuts, topology, rank)
        held[box.slices] += 1
        assert held[box.slices].shape == box.shape
        assert held[box.slices].size == box.size
    assert (held == topology.size // topology.parts(cutting_axes(cuts))).all()


@given(topologies(), st.data())
def test_ranks_along_replicating_axes_hold_the_same_box(
    topology: Topology, data: st.DataObject
) -> None:
    cuts = data.draw(cuts_of(topology, 3))
    rank = data.draw(st.integers(0, topology.size - 1))
    own = rank_box((30, 30, 30), cuts, topology, rank)
    same = [r for r in range(topology.size) if rank_box((30, 30, 30), cuts, topology, r) == own]
    assert same == list(topology.peers(rank, replicating_axes(cuts, topology)))


def test_the_functions_for_rules_of_users_take_lists_and_name_what_are_no_cuts() -> None:
    topology = Topology((1, 1, 1, 1, 2, 1))
    assert layout.replicating_axes([[], [], ["height"], []], topology) == ()
    assert layout.rank_box([1, 1, 5, 4], [[], [], ["height"], []], topology, 1).shape == (
        1,
        1,
        2,
        4,
    )
    for wrong in (Layout(height="height"), ["height"], None):
        with pytest.raises(TypeError, match="pass a sequence of sequences"):
            layout.replicating_axes(wrong, topology)  # type: ignore[arg-type]


def test_a_box_tells_its_shape_size_and_slices() -> None:
    box = Box((1, 0, 5), (3, 4, 5))
    assert box.shape == (2, 4, 0)
    assert box.size == 0
    assert box.slices == (slice(1, 3), slice(0, 4), slice(5, 5))
    assert Box((), ()).size == 1


@pytest.mark.parametrize(
    ("ndim", "names"),
    [
        (0, ""),
        (1, "sample"),
        (2, "sample channel"),
        (3, "sample channel width"),
        (4, "sample channel height width"),
        (5, "sample channel depth height width"),
        (6, "sample channel dim2 depth height width"),
        (7, "sample channel dim2 dim3 depth height width"),
        (8, "sample channel dim2 dim3 dim4 depth height width"),
    ],
)
def test_dimensions_are_named_by_position(ndim: int, names: str) -> None:
    assert dimension_names(ndim) == tuple(names.split())


def test_default_cuts_follow_the_names_where_the_axis_has_several_ranks() -> None:
    topology = Topology((2, 1, 3, 1, 4, 2))
    assert default_cuts(4, topology) == (("sample",), (), ("height",), ("width",))
    assert default_cuts(3, topology) == (("sample",), (), ("width",))
    assert default_cuts(5, topology) == (("sample",), (), (), ("height",), ("width",))


def test_effective_cuts_drop_axes_of_one_rank() -> None:
    topology = Topology((2, 1, 1, 1, 3, 1))
    cuts = (("sample", "channel"), ("depth",), ("width", "height"))
    assert effective_cuts(cuts, topology) == (("sample",), (), ("height",))


@given(topologies(), st.integers(0, 8), st.data())
def test_a_layout_gives_back_the_cuts_it_is_made_of(
    topology: Topology, ndim: int, data: st.DataObject
) -> None:
    cuts = data.draw(cuts_of(topology, ndim))
    layout = Layout.of(cuts)
    assert layout.cuts(ndim) == cuts
    assert pickle.loads(pickle.dumps(layout)) == copy.deepcopy(layout) == layout
    assert hash(Layout.of(cuts)) == hash(layout)
    assert eval(repr(layout)) == layout and "\n" not in repr(layout)


def test_filter_names_the_first_dimension() -> None:
    assert Layout(filter="filter", channel="channel").cuts(4) == (("filter",), ("channel",), (), ())


def test_layouts_are_equal_by_what_they_cut_and_not_by_how_it_was_written() -> None:
    layout = Layout(height="height", sample="sample")
    assert layout == Layout(sample=("sample",), width=None, channel=(), height=["height"])
    assert hash(layout) == hash(Layout(sample="sample", height="height"))
    assert layout != Layout(sample="sample")
    assert Layout(height=("height", "width")) != Layout(height=("width", "height"))
    assert layout != "Layout(sample=sample, height=height)"


def test_a_layout_prints_as_one_line_in_the_order_of_the_dimensions() -> None:
    layout = Layout(width="width", dim2="depth", sample=("sample", "height"))
    assert repr(layout) == "Layout(sample=('sample', 'height'), width='width', dim2='depth')"
    assert repr(Layout()) == "Layout()"


def test_a_layout_is_immutable() -> None:
    layout = Layout(sample="sample")
    with pytest.raises(AttributeError, match="immutable; create a new one"):
        layout._cut = ()
    with pytest.raises(AttributeError, match="immutable; create a new one"):
        layout.height = "height"
    with pytest.raises(AttributeError, match="immutable; create a new one"):
        del layout._cut
    assert layout == Layout(sample="sample")


@pytest.mark.parametrize(
    ("dimensions", "message"),
    [
        ({"rows": "height"}, "'rows' is not a tensor dimension; choose from sample, channel"),
        ({"dim": "height"}, "'dim' is not a tensor dimension"),
        ({"height": "rows"}, "height='rows' is not a grid axis; choose from sample, channel"),
        ({"height": ("height", "dim2")}, "height='dim2' is not a grid axis"),
        ({"height": ""}, "height='' is not a grid axis"),
        ({"height": 2}, "height=2 is not a grid axis"),
        ({"height": 0}, "height=0 is not a grid axis"),
        (
            {"height": "height", "width": ("width", "height")},
            "grid axis 'height' partitions both height and width; use an axis for one dimension",
        ),
        ({"height": ("height", "height")}, "grid axis 'height' partitions both height and height"),
        ({"sample": "sample", "filter": "filter"}, "sample and filter both name dimension 0"),
    ],
)
def test_an_impossible_layout_says_what_is_wrong_with_it(dimensions: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        Layout(**dimensions)
    assert message in str(error.value)


def test_a_dimension_that_the_tensor_lacks_is_named_beside_those_it_has() -> None:
    with pytest.raises(ValueError) as error:
        Layout(depth="depth").cuts(4)
    assert str(error.value) == (
        "Layout(depth='depth') partitions 'depth', but a tensor of 4 dimensions has "
        "(sample, channel, height, width)"
    )
    with pytest.raises(ValueError, match="a tensor of 5 dimensions has"):
        Layout(dim2="depth").cuts(5)
    with pytest.raises(ValueError, match="a tensor of 0 dimensions has"):
        Layout(filter="filter").cuts(0)


class Volume:
    """A tensor that is cut, as an argument of `Layout.like`."""

    cuts = (("sample",), ("channel",), ("depth", "filter"), (), ("width",))


def test_the_layout_of_labels_is_that_of_the_volume_without_its_channels() -> None:
    labels = Layout.like(Volume, without="channel").cuts(4)
    assert labels == (("sample",), ("depth", "filter"), (), ("width",))
    assert Layout.like(Volume, without=["channel", "width"]).cuts(3) == labels[:3]
    assert Layout.like(Volume).cuts(5) == Volume.cuts
    with pytest.raises(TypeError, match="expected a DistTensor, not int"):
        Layout.like(5)  # type: ignore[arg-type]


def test_a_dimension_that_is_not_there_cannot_be_left_out() -> None:
    with pytest.raises(ValueError, match=r"without=\['chanel'\] names no dimension of the tensor"):
        Layout.like(Volume, without="chanel")


@pytest.mark.parametrize(
    ("operands", "cuts"),
    [
        # What is whole is sliced, whether it comes first or is the largest.
        ([((4, 6), ((), ())), ((4, 6), ((), ("width",)))], ((), ("width",))),
        ([((4, 6), ((), ())), ((6,), (("width",),))], ((), ("width",))),
        ([((4, 6), (("height",), ())), ((6,), (("width",),))], (("height",), ("width",))),
        # Where both are cut, the largest decides, also by what its axes cut elsewhere.
        ([((6,), (("width",),)), ((4, 6), ((), ("height",)))], ((), ("height",))),
        ([((6,), (("height",),)), ((4, 6), (("height",), ()))], (("height",), ())),
        # Dimensions of one element say nothing.
        ([((4, 1), (("height",), ("width",))), ((1, 6), ((), ()))], (("height",), ())),
    ],
)
def test_a_broadcast_result_is_cut_where_any_operand_is(operands: list, cuts: tuple) -> None:
    assert cuts_of_broadcast(tuple(operands), (4, 6)) == cuts
