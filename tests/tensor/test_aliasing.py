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
@pytest.mark.parametrize("layout", [{"height": "height"}, {"sample": "height"}])
def test_a_view_whose_block_was_brought_and_its_base_see_each_other(layout: dict[str, str]) -> None:
    serial, x = distributed()
    x = x.redistribute(dc.Layout(**layout))
    views = [t.view(2, 28, 5) for t in (serial, x)]
    for write in (
        lambda t, view: t.mul_(2),
        lambda t, view: view.add_(1),
        lambda t, view: t[:, :, 1:3].fill_(7),
    ):
        views[1].to_local()
        for t, view in zip((serial, x), views, strict=True):
            write(t, view)
        assert torch.equal(x.full_tensor(), serial)
        assert torch.equal(views[1].full_tensor(), views[0])


@pytest.mark.parallel([2, 4])
def test_what_may_be_a_view_or_a_copy_is_not_written_while_its_source_is_in_use() -> None:
    serial, x = distributed()
    y = x.transpose(2, 3).contiguous()
    with pytest.raises(dc.UnsupportedOperation, match=r"\.clone\(\) one of the two"):
        y.add_(1)
    del x
    assert torch.equal(y.add_(1).full_tensor(), serial.transpose(2, 3) + 1)


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize(
    "part", [torch.real, torch.imag, torch.conj, lambda x: x.imag, torch.Tensor.conj]
)
@pytest.mark.parametrize("layout", [{"height": "height"}, {"sample": "height"}])
def test_parts_of_complex_numbers_share_their_memory(
    part: Callable, layout: dict[str, str]
) -> None:
    serial = torch.complex(*distributed()[0].view(2, 1, 4, 7, 5))
    x = dc.distribute_tensor(serial, dc.ProcessGrid(height=-1), dc.Layout(**layout))
    views = [(t[:, 2:], part(t), part(t[0])) for t in (serial, x)]
    for write in (
        lambda views: views[1].mul_(2),
        lambda views: views[2].add_(3),
        lambda views: views[0].zero_(),
        lambda views: part(views[0]).fill_(5),
    ):
        for views_of_one in views:
            write(views_of_one)
        assert torch.equal(x.full_tensor(), serial)
        for a, b in zip(*views, strict=True):
            assert torch.equal(b.full_tensor(), a)


@pytest.mark.parallel([2, 4])
def test_a_view_that_becomes_a_leaf_keeps_its_block_and_its_gradient() -> None:
    serial, x = distributed()
    leaves = [t[:, :, 1:4].requires_grad_() for t in (serial, x)]
    for t, leaf in zip((serial, x), leaves, strict=True):
        (leaf * t[:, :, :3]).sum().backward()
    with pytest.raises(dc.UnsupportedOperation, match=r"\.clone\(\) one of the two"):
        x.add_(1)
    assert torch.equal(leaves[1].grad.full_tensor(), leaves[0].grad)
    alone = distributed()[1][:, :, 1:4].requires_grad_()
    with torch.no_grad():
        alone.sub_(1)
    assert alone.is_leaf and torch.equal(alone.detach().full_tensor(), serial[:, :, 1:4] - 1)


@pytest.mark.parallel([2, 4])
def test_an_outdated_view_that_becomes_a_leaf_has_what_was_written() -> None:
    serial, x = distributed()
    views = [t[:, :, 1:4] for t in (serial, x)]
    for t, view in zip((serial, x), views, strict=True):
        t.add_(1)
        view.requires_grad_()
    assert not x.requires_grad
    assert torch.equal(views[1].detach().full_tensor(), views[0])


@pytest.mark.parallel([2, 4])
def test_detach_and_writes_to_positions_in_place_equal_serial() -> None:
    serial, x = distributed()
    results = []
    for t in (serial, x):
        y = t.clone().requires_grad_() * 2
        assert y.detach_() is y and not y.requires_grad and y.is_leaf
        y.index_put_((torch.tensor([0, 1]), torch.tensor([3, 0])), t[:, 2] * 5)
        y.index_put_((y > 500,), torch.tensor(0.0))
        y.put_(torch.tensor([1]), t[0, 0, 0, :1])
        results.append(y)
        with pytest.raises(RuntimeError, match="view"):
            t[:, :, 1:3].detach_()
    assert torch.equal(results[1].full_tensor(), results[0])
