"""Cuts of tensors, for rules that users write; see docs/howto/extending.md."""

from distconv.geometry.layout import (
    Box,
    Cuts,
    Layout,
    cutting_axes,
    rank_box,
    replicating_axes,
)

__all__ = ["Box", "Cuts", "Layout", "cutting_axes", "rank_box", "replicating_axes"]
