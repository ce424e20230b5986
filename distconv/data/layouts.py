"""The cuts of the tensors of one mini-batch, from the shapes of a sample's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from distconv.geometry.layout import Cuts, Layout
from distconv.grid.interface import Grid
from distconv.tensor.redistribution import cuts_of_layout

Name = TypeVar("Name")


def batch_cuts(
    shapes: Mapping[Name, tuple[int, ...]], layout: Layout | Mapping[Any, Layout] | None, grid: Grid
) -> dict[Name, Cuts]:
    """Return the cuts of each field of a mini-batch, samples first.

    A field without a layout is cut as the first one if it has as many dimensions, or if it has the
    first field's shape without the channels; other fields are cut by samples only.

    Parameters
    ----------
    shapes: the shape of one sample of each field, without the dimension of samples.
    layout: the layout of the first field, or a dictionary of layouts by field; by default every
        dimension is cut over the axis of its own name.

    Raises ValueError for names that are no fields, and dimensions that a field does not have.
    """
    by_name = layout if isinstance(layout, Mapping) else {}
    check_names(shapes, layout=layout)
    names = list(shapes)
    chosen = by_name.get(names[0]) if isinstance(layout, Mapping) else layout
    first_shape = shapes[names[0]]
    first = cuts_of_layout(chosen, grid, 1 + len(first_shape))
    cuts = {}
    for name, shape in shapes.items():
        ndim = 1 + len(shape)
        if name in by_name:
            cuts[name] = cuts_of_layout(by_name[name], grid, ndim)
        elif ndim == len(first):
            cuts[name] = first
        elif len(first) > 2 and shape == first_shape[1:]:
            cuts[name] = (first[0], *first[2:])
        else:
            cuts[name] = (first[0], *[()] * (ndim - 1))
    return cuts


def check_names(names: Mapping[Any, object], **choices: Any) -> None:
    """Raise `ValueError` if one of the arguments `choices` has a key that is not in `names`."""
    for argument, choice in choices.items():
        unknown = set(choice) - set(names) if isinstance(choice, Mapping) else set()
        if unknown:
            raise ValueError(
                f"{argument}= names {sorted(map(str, unknown))}, and the fields are {list(names)}"
            )
