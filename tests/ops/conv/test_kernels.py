"""A halo exchange adds few kernels to a convolution: an accelerator takes long to launch each."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from distconv import method
from distconv.planning.dry_run import DryRunGrid
from distconv.tensor.ownership import own
from tests.support.kernels import block_on, kernels_of

FIRST, LAST = torch.contiguous_format, torch.channels_last


def added(
    extents: dict[str, int],
    way: str = "assembled",
    form: torch.memory_format = FIRST,
    samples: int = 1,
    gpu: bool = False,
) -> Counter[str]:
    """Return the kernels of a 3x3 convolution, forward and backward, that plain torch's lacks.

    The convolution is that of the rank in the middle of a dry grid. With `gpu`, tensors have no
    elements, and the rank takes itself for one with a GPU.
    """
    grid = DryRunGrid(extents, gpu=gpu)
    layer = nn.Conv2d(4, 4, 3, padding=1, device="meta" if gpu else "cpu")
    own(layer.parameters(), ranks=1)
    shape = samples, 4, 16 * extents.get("height", 1), 16 * extents.get("width", 1)
    x = block_on(grid, shape, form, "meta" if gpu else "cpu")
    x.requires_grad_()
    plain = x.shard.detach().requires_grad_()

    def step(x: torch.Tensor) -> None:
        x.grad = None
        layer.zero_grad()
        y = layer(x)
        y.backward(torch.ones_like(y))

    with method(way):
        return kernels_of(lambda: step(x)) - kernels_of(lambda: step(plain))


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("form", [FIRST, LAST], ids=str)
@pytest.mark.parametrize(
    ("extents", "most"),
    [({"height": 2}, 7), ({"height": 4}, 6), ({"width": 4}, 6), ({"height": 4, "width": 4}, 8)],
    ids=str,
)
def test_an_assembled_convolution_has_few_kernels_more_than_plain_torchs(
    extents: dict[str, int], most: int, form: torch.memory_format, samples: int
) -> None:
    kernels = added(extents, form=form, samples=samples)
    assert kernels.total() <= most, kernels
    # On a GPU, where the order of sums is not fixed, corners are added by kernels of their own.
    kernels = added(extents, form=form, samples=samples, gpu=True)
    assert kernels.total() <= most, kernels


def test_halo_rows_of_one_sample_with_channels_last_are_not_copied() -> None:
    # The block is copied into the buffer, where halos arrive. Backward, their gradients are added
    # to the part of the buffer's gradient that is the block's.
    kernels = added({"height": 4}, form=LAST)
    assert kernels == {"copy_": 1, "index_add_": 1}, kernels
    kernels = added({"height": 4}, "overlapped", LAST)
    assert not {"index_select", "index_copy_", "clone", "copy_"} & kernels.keys(), kernels


def test_corners_are_added_one_after_the_other_where_their_order_is_not_fixed() -> None:
    both = {"height": 4, "width": 4}
    assert added(both)["index_add_"] == 1
    assert added(both, gpu=True)["index_add_"] == 3
    assert added({"height": 4}, gpu=True)["index_add_"] == 1


@pytest.mark.parametrize(
    ("extents", "most"), [({"height": 4}, 10), ({"height": 4, "width": 4}, 28)], ids=str
)
def test_an_overlapped_convolution_writes_no_zeros_where_halos_arrive(
    extents: dict[str, int], most: int
) -> None:
    # Each side has a convolution of its own forward and backward, and sums of its results.
    kernels = added(extents, "overlapped")
    assert kernels.total() <= most and not kernels["new_zeros"], kernels
