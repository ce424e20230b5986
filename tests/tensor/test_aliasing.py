"""Writing in place changes what serial torch would change, or is refused; alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import distconv as dc

SHAPE = (2, 4, 7, 5)

NEW: dict[str, Callable] = {
    "pad": lambda x: F.pad(x, (0, 0, 0, 1)),
    "pad by nothing": lambda x: F.pad(x, (0, 0)),
    "crop": lambda x: F.pad(x, (0, 0, 0, -1)),
    "adaptive pooling to the same size": lambda x: F.adaptive_avg_pool2d(x, (7, 5)),
    "flip of nothing": lambda x: torch.flip(x, []),
    "roll by nothing": lambda x: torch.roll(x, 0, 2),
    "cat of one": lambda x: torch.cat([x], 2),
    "repeat once": lambda x: x.repeat(1, 1, 1, 1),
    "clone": lambda x: x.clone(),
    "interpolate to the same size": lambda x: F.interpolate(x, size=(7, 5)),
    "sum over nothing there": lambda x: x.unsqueeze(0).sum(0),
}

SAME: dict[str, Callable] = {
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "type_as": lambda x: x.type_as(x),
    "cpu": lambda x: x.cpu(),
    "detach": lambda x: x.detach(),
    "transpose": lambda x: x.transpose(2, 3),
    "whole slice": lambda x: x[:, 1:3],
}

MERGED: dict[str, Callable] = {
    "view that merges a cut dimension into another": lambda x: x.view(2, 28, 5),
    "view of such a view": lambda x: x.view(2, 28, 5).transpose(0, 2)[1:],
}

COPIES: dict[str, Callable] = {
    "slice of a cut dimension": lambda x: x[:, :, :3],
    "other slice": lambda x: x[:, :, 1:],
    "view": lambda x: x.view(2, 4, 35),
    "view that was looked at": lambda x: _looked_at(x.view(2, 28, 5)),
    "contiguous": lambda x: x.transpose(2, 3).contiguous(),
}


def _looked_at(x: dc.DistTensor) -> dc.DistTensor:
    """Have the block of `x` brought to each rank."""
    x.to_local()
    return x


def distributed() -> tuple[torch.Tensor, dc.DistTensor]:
    x = torch.arange(280.0).view(SHAPE)
    return x, dc.distribute_tensor(x, dc.ProcessGrid(height=-1))


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("name", NEW)
def test_a_new_tensor_can_be_written_and_leaves_its_source_alone(name: str) -> None:
    serial, x = distributed()
    y, expected = NEW[name](x), NEW[name](serial.clone())
    y.add_(10)
    assert torch.equal(x.full_tensor(), serial)
    assert torch.equal(y.full_tensor(), expected + 10)
    with_gradient = NEW[name](x.clone().requires_grad_() * 1)
    with_gradient.relu_()
    assert torch.equal(with_gradient.detach().full_tensor(), expected.relu())


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("name", SAME)
def test_what_shares_memory_sees_what_is_written(name: str) -> None:
    serial, x = distributed()
    SAME[name](x).add_(10)
    SAME[name](serial).add_(10)
    assert torch.equal(x.full_tensor(), serial)


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("name", MERGED)
def test_what_is_merged_shares_memory_until_it_is_looked_at(name: str) -> None:
    serial, x = distributed()
    MERGED[name](x).add_(10)
    MERGED[name](serial).add_(10)
    assert torch.equal(x.full_tensor(), serial)


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("name", COPIES)
def test_a_view_that_is_a_copy_cannot_be_written_while_its_source_is_in_use(name: str) -> None:
    _, x = distributed()
    y = COPIES[name](x)
    for tensor in (x, y):
        with pytest.raises(dc.UnsupportedOperation, match="written in place while a view"):
            tensor.add_(1)
    expected = y.full_tensor() + 1
    del x
    tensor = y.add_(1)
    assert torch.equal(tensor.full_tensor(), expected)


@pytest.mark.parallel([2, 4])
def test_two_views_of_one_tensor_are_not_written_past_each_other() -> None:
    _, x = distributed()
    a, b = x[:, :, :4], x[:, :, 2:]
    del x
    with pytest.raises(dc.UnsupportedOperation, match="written in place while a view"):
        a.add_(1)
    del b
    a.add_(1)


@pytest.mark.parallel([2])
def test_a_view_of_a_conversion_to_itself_is_still_a_view() -> None:
    _, x = distributed()
    view = x[:, :, 1:]
    with pytest.raises(dc.UnsupportedOperation, match="written in place while a view"):
        x.float().add_(1)
    assert view.is_contiguous() and x.is_contiguous()
