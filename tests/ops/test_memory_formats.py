"""Rules keep channels last wherever torch's own functions keep them, forward and backward."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

import distconv as dc
from distconv.comm.packing import CHANNELS_LAST, has_channels_last
from tests.support.samples import Sample, bare, is_random, samples_of, with_rules
from tests.support.serial import noted

LOSING = {
    *("channel_shuffle", "native_channel_shuffle", "dstack", "index_fill", "put"),
    *("max_unpool2d", "rms_norm"),
}
"""Functions whose rules go by reshapes, or by pieces that are put together with channels first.
Their numbers are right, and networks hardly have them between convolutions."""


def in_format(x: Tensor) -> Tensor:
    """Return planes and volumes with channels last, and any other tensor as it is."""
    form = CHANNELS_LAST.get(x.dim())
    return x if form is None else x.contiguous(memory_format=form)


def is_last(x: Tensor) -> bool:
    return x.dim() in CHANNELS_LAST and not x.is_contiguous() and in_format(x) is x


def results(name: str, sample: Sample, leaves: list[Tensor], plain: list[Tensor]) -> list[Any]:
    """Return what a call makes of leaves, and the gradients of the leaves where it has any."""
    leaves = [x.requires_grad_(x.is_floating_point()) for x in leaves]
    made = sample.call(name, *leaves, *plain)
    made = [y for y in (made if isinstance(made, (tuple, list)) else [made]) if torch.is_tensor(y)]
    with suppress(RuntimeError):
        recorded = [y for y in made if y.requires_grad and y.is_floating_point()]
        sum(((y * y).sum() for y in recorded), torch.zeros(())).backward()
    return [*made, *(x.grad for x in leaves if x.is_floating_point())]


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("key", dict.fromkeys(bare(n).removesuffix("_") for n in with_rules()))
@pytest.mark.filterwarnings("ignore")
def test_what_has_channels_last_in_torch_has_them_last(key: str) -> None:
    grid = dc.ProcessGrid(height=-1, device="cpu")
    lost = []
    for name in with_rules():
        if bare(name).removesuffix("_") == key and not is_random(name):
            for sample in samples_of(name):
                with noted(name, sample.args[1:], grid):
                    lost += grid.all_gather_object(lost_in(name, sample, grid))
    if key not in LOSING:
        assert not any(lost), lost
    elif grid.size > 1:
        assert any(lost), "this one does not lose any more"


def lost_in(name: str, sample: Sample, grid: dc.ProcessGrid) -> list[Any]:
    """Return the strides of results that have channels last in torch, and not in this block."""
    inputs, plain = (
        [o.values(random.Random(name), o.shape) for o in sample.operands(given)]
        for given in (False, True)
    )
    if not any(x.dim() in CHANNELS_LAST for x in inputs):
        return []
    try:
        expected = results(name, sample, [in_format(x).clone() for x in inputs], plain)
    except RuntimeError:  # such as view, which does not copy
        return []
    blocks = [in_format(x[dc.local_box(x.shape, grid).slices]).clone() for x in inputs]
    whole = zip(blocks, inputs, strict=True)
    cut: list[Any] = [dc.DistTensor.from_local(x, grid, shape=y.shape) for x, y in whole]
    lost = []
    try:
        made = results(name, sample, cut, plain)
    except dc.UnsupportedOperation:  # such as numpy, for which no rank has all elements
        return []
    for wanted, got in zip(expected, made, strict=True):
        if wanted is not None and got is not None and is_last(wanted):
            block = got.shard if isinstance(got, dc.DistTensor) else got
            if (
                block.dim() == wanted.dim()
                and min(block.shape) > 1
                and not has_channels_last(block)
            ):
                lost.append((wanted.stride(), block.stride()))
    return lost


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("name", ["pixel_shuffle", "pixel_unshuffle"])
def test_a_single_sample_keeps_channels_last_when_shuffled(name: str) -> None:
    grid = dc.ProcessGrid(height=-1, device="cpu")
    x = dc.distribute_tensor(in_format(torch.randn(1, 8, 8, 8)), grid).requires_grad_()
    made = getattr(torch, name)(x, 2)
    (made * made).sum().backward()
    for block in (made.shard, x.grad.shard):
        assert block.is_contiguous(memory_format=torch.channels_last)
