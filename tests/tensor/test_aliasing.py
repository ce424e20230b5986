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

ELSEWHERE: dict[str, Callable] = {
    "slice of a cut dimension": lambda x: x[:, :, :3],
    "other slice": lambda x: x[:, :, 1:],
    "view": lambda x: x.view(2, 4, 35),
    "view that was looked at": lambda x: _looked_at(x.view(2, 28, 5)),
    "slice of a view": lambda x: x.view(2, 28, 5)[:, 3:20],
    "sample": lambda x: x[0],
    "row": lambda x: x[:, :, 2],
    "diagonal": lambda x: x.diagonal(0, 2, 3),
    "piece": lambda x: x.chunk(2, 2)[0],
}


def _looked_at(x: torch.Tensor) -> torch.Tensor:
    """Have the block of a DistTensor brought to each rank."""
    if isinstance(x, dc.DistTensor):
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
@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("layout", [{"height": "height"}, {"sample": "height"}])
def test_views_whose_elements_lie_elsewhere_and_their_base_see_each_other(
    name: str, layout: dict[str, str]
) -> None:
    serial, x = distributed()
    x = x.redistribute(dc.Layout(**layout))
    views = [(ELSEWHERE[name](t), t.detach()[:, :, 2:]) for t in (serial, x)]
    for write in (
        lambda t, views: t.mul_(2),
        lambda t, views: views[0].add_(1),
        lambda t, views: views[1].zero_(),
        lambda t, views: views[0].copy_(views[0] * 3),
        lambda t, views: t[:, :, 1:3].fill_(7),
    ):
        for t, both in zip((serial, x), views, strict=True):
            write(t, both)
        assert torch.equal(x.full_tensor(), serial)
        for a, b in zip(*views, strict=True):
            assert torch.equal(b.full_tensor(), a)


@pytest.mark.parallel([2, 4])
def test_writes_to_slices_of_cut_dimensions_have_serial_gradients() -> None:
    serial, _ = distributed()
    grid = dc.ProcessGrid(height=-1)
    a, b = serial.clone().requires_grad_(), dc.distribute_tensor(serial, grid).requires_grad_()
    p, q = (torch.full((4, 1, 5), 2.0, requires_grad=True) for _ in range(2))
    losses = []
    for x, weight in ((a, p), (b, q)):
        out = x * 1
        out[:, :, 2:5] *= weight
        out[0] += x[1]
        out.narrow(2, 4, 3).add_(x[:, :, :3])
        out.diagonal(0, 2, 3).zero_()
        losses.append((out * out).sum())
    losses[0].backward()
    losses[1].backward()
    torch.testing.assert_close(b.grad.full_tensor(), a.grad)
    torch.testing.assert_close(q.grad, p.grad)


@pytest.mark.parallel([2, 4])
def test_what_may_be_a_view_or_a_copy_is_not_written_while_its_source_is_in_use() -> None:
    serial, x = distributed()
    y = x.transpose(2, 3).contiguous()
    with pytest.raises(dc.UnsupportedOperation, match=r"\.clone\(\) one of the two"):
        y.add_(1)
    del x
    assert torch.equal(y.add_(1).full_tensor(), serial.transpose(2, 3) + 1)
