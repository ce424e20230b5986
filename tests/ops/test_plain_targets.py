"""A plain tensor that takes distributed values under autograd becomes the distributed tensor."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import distconv as dc
from tests.support.serial import agrees, noted, raised_everywhere, random_tensor

WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "number, +=": lambda out, y, _: [out.__iadd__(term) for term in ((y * y).sum(), y.mean())],
    "+=": lambda out, y, _: out.__iadd__(y),
    "broadcast": lambda out, y, _: out.mul_(y[:, :1]).sub_(y.mean(3, keepdim=True), alpha=2),
    "copy_": lambda out, y, _: out.copy_(y),
    "addcmul_": lambda out, y, w: out.addcmul_(y, w).addcmul_(w, w, value=0.5),
    "lerp_": lambda out, y, _: out.lerp_(y, 0.25),
    "masked_fill_": lambda out, y, _: out.masked_fill_(y > 0, 2.0),
    "slice": lambda out, y, _: out.__setitem__((slice(None), slice(None), slice(2, None)), y),
    "step": lambda out, y, _: out.__setitem__((..., slice(1, None, 2), slice(None)), y),
    "integer": lambda out, y, _: out.__setitem__(1, y),
    "new dimension": lambda out, y, _: out.__setitem__((slice(None), None), y[:, None]),
    "part of the value": lambda out, y, _: out.__setitem__((slice(None), 1), y[:, 0] * y[:, 1]),
    "mask": lambda out, y, _: out.__setitem__(y > 0, y[y > 0] * 2),
    "plain mask": lambda out, y, w: out.__setitem__(w > 0, y[w > 0]),
    "mask, number": lambda out, y, _: out.__setitem__(y > 0, 3.0),
    "positions": lambda out, y, _: out.__setitem__((slice(None), torch.tensor([2, 0])), y[:, :2]),
    "index_add_": lambda out, y, _: out.index_add_(1, torch.tensor([2, 0, 2]), y, alpha=2),
    "index_copy_": lambda out, y, _: out.index_copy_(2, torch.tensor([1]), y[:, :, :1]),
    "scatter_": lambda out, y, w: out.scatter_(1, (w > 0).long(), y),
    "scatter_add_": lambda out, y, w: out.scatter_add_(2, (w > 0).long(), y),
    "addmm_": lambda out, y, _: out.addmm_(y[0, 0].mT, y[0, 1], beta=2),
    "cumsum_ after": lambda out, y, _: out.add_(y).cumsum_(2),
}
"""What is written to a plain tensor: a plain one of 1, a distributed one, a plain parameter."""

SHAPES: dict[str, Callable[[int, int, int, int], tuple[int, ...]]] = {
    "number, +=": lambda n, c, h, w: (),
    "slice": lambda n, c, h, w: (n, c, h + 2, w),
    "step": lambda n, c, h, w: (n, c, 2 * h + 1, w),
    "integer": lambda n, c, h, w: (3, n, c, h, w),
    "addmm_": lambda n, c, h, w: (w, w),
}


def written(name: str, y: Tensor, w: Tensor, *, depends: bool) -> Tensor:
    """Return what becomes of a plain tensor, which depends on the parameter, or is of ones."""
    out = torch.ones(SHAPES.get(name, lambda *shape: shape)(*y.shape), dtype=y.dtype)
    if depends:
        out = out * w.mean()
    same = out
    WRITES[name](out, y, w)
    assert same is out and isinstance(out, type(y))
    return out * 2 + w.sum()


@pytest.mark.parallel([2])
@pytest.mark.parametrize("depends", [False, True])
@pytest.mark.parametrize("layout", [{"height": "height"}, {"sample": "height"}])
def test_a_plain_tensor_that_takes_values_under_autograd_equals_serial(
    layout: dict[str, str], depends: bool
) -> None:
    rng = random.Random(0)
    grid = dc.ProcessGrid(height=-1)
    for name in WRITES:
        for shape in ((2, 3, 7, 5), (1, 3, 2, 5)):
            if name in ("masked_fill_", "mask, number") and not depends:
                continue  # which autograd does not record
            with noted(name, shape):
                y, w = random_tensor(rng, shape), random_tensor(rng, shape)
                agrees(
                    lambda y, w, name=name: written(name, y, w, depends=depends),
                    *([y], [w], grid, rng, [dc.Layout(**layout)]),
                )


@pytest.mark.parallel([2, 4])
def test_what_is_assigned_gives_a_plain_tensor_its_layout() -> None:
    grid = dc.ProcessGrid(height=-1)
    y = dc.distribute_tensor(torch.ones(2, 3, 7, 5), grid).requires_grad_()
    a, b, c = torch.zeros(2, 3, 9, 5), torch.zeros(4, 2, 3, 7, 5), torch.zeros(7, 5)
    a[:, :, :7], b[1] = y, y
    c += y[0, 0]
    assert a.grid_layout == y.grid_layout  # type: ignore[comparison-overlap]
    assert b.cuts == ((), *y.cuts) and c.cuts == y.cuts[2:]  # type: ignore[attr-defined]


def _view(made: list[Any]) -> Tensor:
    return torch.zeros(2, 3, 5, 7).mT


def _viewed(made: list[Any]) -> Tensor:
    x = torch.zeros(2, 3, 7, 5)
    made.append(x[1:])
    return x


def _lent(made: list[Any]) -> Tensor:
    x = torch.zeros(2, 3, 7, 5)
    made.append(x.numpy())
    return x


def _referred(made: list[Any]) -> Tensor:
    x = torch.zeros(2, 3, 7, 5)
    made.append(weakref.ref(x))
    return x


def _saved(made: list[Any]) -> Tensor:
    x = torch.zeros(2, 3, 7, 5)
    made.append(x * torch.ones(5, requires_grad=True))
    return x


def _retaining(made: list[Any]) -> Tensor:
    x = torch.zeros(2, 3, 7, 5, requires_grad=True) * 2
    x.retain_grad()
    return x


def _buffer(made: list[Any]) -> Tensor:
    module = torch.nn.BatchNorm2d(3)
    module.register_buffer("kept", torch.zeros(2, 3, 7, 5))
    made.append(dc.parallelize(module, dc.ProcessGrid(height=-1)))
    return module.kept  # type: ignore[return-value]


REFUSED: dict[Callable[[list[Any]], Tensor], str] = {
    _view: "it is a view",
    _viewed: "views of it are in use",
    _lent: "NumPy",
    _referred: "weak reference",
    _saved: "saved it",
    _retaining: "retains its gradient",
    _buffer: "of a parallelized module",
    lambda made: torch.zeros(2, 3, 7, 5, requires_grad=True): "a leaf that requires gradients",
    lambda made: torch.nn.Parameter(torch.zeros(2, 3, 7, 5), False): "it is a Parameter",
}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("make", REFUSED)
def test_a_plain_tensor_that_others_refer_to_stays_as_it_is(
    make: Callable[[list[Any]], Tensor],
) -> None:
    y = dc.distribute_tensor(torch.ones(2, 3, 7, 5), dc.ProcessGrid(height=-1)).requires_grad_()
    made: list[Any] = []
    x = make(made)
    kind = type(x)
    for write in (
        lambda: x.__setitem__(slice(None), y),
        lambda: x.add_(y),
        lambda: x.index_add_(1, torch.tensor([0, 1, 2]), y),
    ):
        text = raised_everywhere(dc.UnsupportedOperation, write)
        assert REFUSED[make] in text and "total = total + loss" in text
        assert type(x) is kind and not x.detach().any()


@pytest.mark.parallel([2, 4])
def test_a_write_that_fails_leaves_a_plain_tensor_plain() -> None:
    y = dc.distribute_tensor(torch.ones(2, 3, 7, 5), dc.ProcessGrid(height=-1)).requires_grad_()
    for x, write in (
        (torch.zeros(7, 5), lambda x: x.add_(y)),
        (torch.zeros(2, 3, 7, 5, dtype=torch.int64), lambda x: x.add_(y)),
        (torch.zeros(2, 3, 9, 5), lambda x: x.__setitem__(slice(None), y)),
        (torch.zeros(2, 3, 7, 5), lambda x: x.index_add_(1, torch.tensor([0]), y)),
    ):
        with pytest.raises(RuntimeError):
            write(x)
        assert type(x) is Tensor and not x.any()


@pytest.mark.parallel([2, 4])
def test_outside_autograd_a_plain_tensor_stays_plain_and_whole() -> None:
    whole = torch.arange(210.0).view(2, 3, 7, 5)
    y = dc.distribute_tensor(whole, dc.ProcessGrid(height=-1)).requires_grad_()
    places = torch.tensor([2, 0, 2])
    for write in (
        lambda x, y: x.add_(y),
        lambda x, y: x.__setitem__((slice(None), slice(1, None)), y[:, 1:]),
        lambda x, y: x.index_add_(1, places, y),
        lambda x, y: x.scatter_(1, y.long() % 3, y),
    ):
        for guard, values in ((torch.no_grad(), y), (torch.enable_grad(), y.detach())):
            out, expected = torch.ones(2, 3, 7, 5), torch.ones(2, 3, 7, 5)
            with guard:
                write(out, values)
            write(expected, whole)
            assert type(out) is Tensor and torch.equal(out, expected)


TILES: dict[str, Callable[[Tensor, Tensor, int, int], Any]] = {
    "+=": lambda out, y, a, b: _added(out, (..., slice(a, a + 4), slice(b, b + 5)), y),
    "integer": lambda out, y, a, b: _added(out, (0, ..., slice(a, a + 4), slice(b, b + 5)), y[0]),
    "step": lambda out, y, a, b: _added(out, (..., slice(a % 2, None, 2), slice(b, b + 5)), y),
    "one": lambda out, y, a, b: out[0:1, :, a : a + 4, b : b + 5].add_(y),
    "named": lambda out, y, a, b: _through_a_name(out[:, :, a : a + 4, b : b + 5], y),
    "in a view": lambda out, y, a, b: out[0].__setitem__((1, 3), y[0, 0, 0, 0]),
    "of a view": lambda out, y, a, b: out[0][:, a : a + 4].mul_(y[0, :, :, :1]),
}
"""Writes to a part of a plain tensor."""


def _added(out: Tensor, index: Any, y: Tensor) -> None:
    out[index] += y


def _through_a_name(part: Tensor, y: Tensor) -> None:
    same = part
    part += y
    assert same is part and isinstance(part, type(y))


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("depends", [False, True])
def test_parts_of_a_plain_tensor_take_values_as_in_sliding_windows(
    name: str, depends: bool
) -> None:
    rng = random.Random(1)
    grid = dc.ProcessGrid(height=-1)

    def tiled(x: Tensor, w: Tensor) -> Tensor:
        out = torch.ones(1, 2, 8, 8, dtype=x.dtype)
        out = out * w if depends else out
        same = out
        for a, b in ((0, 0), (2, 3), (4, 1)):
            TILES[name](out, x[:, :, a : a + 4, b : b + 5].sin() * w, a, b)
        assert same is out and isinstance(out, type(x))
        return out * 2

    for layout in (dc.Layout(height="height"), dc.Layout(width="height"), dc.Layout()):
        x, w = random_tensor(rng, (1, 2, 8, 8)), random_tensor(rng, (1,))
        agrees(tiled, [x], [w], grid, rng, [layout])


@pytest.mark.parallel([2])
def test_a_part_stays_plain_where_its_base_has_other_users() -> None:
    y = dc.distribute_tensor(torch.ones(7, 5), dc.ProcessGrid(height=-1)).requires_grad_()
    out = torch.zeros(2, 7, 5)
    other, part = out[1], out[0]
    assert "views of it are in use" in raised_everywhere(
        dc.UnsupportedOperation, lambda: part.add_(y)
    )
    del other
    with pytest.raises(RuntimeError):
        part.add_(y[:3])
    part += y
    assert (out.sum((1, 2)).full_tensor() == torch.tensor([35.0, 0.0])).all()  # type: ignore[attr-defined]


OVER: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy_": lambda out, y: out.copy_(y),
    "slice": lambda out, y: [out.__setitem__(slice(i, i + 1), y[i : i + 1]) for i in range(4)],
    "index_copy_": lambda out, y: out.index_copy_(0, torch.arange(4), y),
    "index_fill_": lambda out, y: out.index_fill_(0, torch.arange(4), y[0, 0]),
    "index_put_": lambda out, y: out.index_put_((torch.arange(4),), y),
    "put_": lambda out, y: out.put_(torch.arange(24).view(4, 6), y),
    "scatter_": lambda out, y: out.scatter_(0, torch.arange(4)[:, None].expand(4, 6), y),
    "masked_fill_": lambda out, y: out.masked_fill_(y == y, 2.0),
    "masked_scatter_": lambda out, y: out.masked_scatter_(y == y, y),
    "fill_": lambda out, y: out.fill_(y.sum()),
    "torch.fill_": lambda out, y: torch.fill_(out, y.sum()),
    "addmm_": lambda out, y: out.addmm_(y, y.T @ y, beta=0),
    "addr_": lambda out, y: out.addr_(y[:, 0], y[0], beta=0),
}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", OVER)
def test_memory_that_is_written_over_may_differ_between_ranks(name: str, recorded: bool) -> None:
    rng = random.Random(0)
    grid = dc.ProcessGrid(width=-1)

    def function(y: Tensor) -> Tensor:
        # As freed memory, which torch.empty returns.
        out = torch.full((4, 6), float(grid.rank), dtype=y.dtype)
        with torch.set_grad_enabled(recorded):
            OVER[name](out, y)
        return out * 2 + y

    agrees(function, [random_tensor(rng, (4, 6))], [], grid, rng)


UNREAD: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "baddbmm": lambda out, y: torch.baddbmm(out[None], y[None], y.T[None], beta=0, alpha=2),
    "method": lambda out, y: out[None].baddbmm(y[None], y.T[None], beta=0),
    "addbmm": lambda out, y: torch.addbmm(out, y[None], y.T[None], beta=0),
    "addmm": lambda out, y: torch.addmm(out, y, y.T, beta=0),
    "addmv": lambda out, y: torch.addmv(out[0], y, y[0], beta=0),
    "addr": lambda out, y: torch.addr(out, y[:, 0], y[:, 1], beta=0),
    "expand_as": lambda out, y: y[:, :1].expand_as(out),
    "view_as": lambda out, y: y[:, :4].contiguous().view_as(out),
    "reshape_as": lambda out, y: y[:, :4].reshape_as(out),
    "type_as": lambda out, y: y.type_as(out),
    "to": lambda out, y: y.to(out),
}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("name", UNREAD)
def test_memory_that_is_not_read_may_differ_between_ranks(name: str) -> None:
    rng = random.Random(0)
    grid = dc.ProcessGrid(width=-1)

    def function(y: Tensor) -> Tensor:
        return UNREAD[name](torch.full((4, 4), float(grid.rank), dtype=y.dtype), y)

    agrees(function, [random_tensor(rng, (4, 6))], [], grid, rng)


READ: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "+": lambda out, y: y + out,
    "index_put_": lambda out, y: out.index_put_((torch.tensor([1, 1]),), y[:2], accumulate=True),
    "torch.index_put_": lambda out, y: torch.index_put_(out, (torch.tensor([0]),), y[:1], True),
    "put_": lambda out, y: out.put_(torch.tensor([1, 1]), y[0, :2], accumulate=True),
    "put_ by position": lambda out, y: out.put_(torch.tensor([1, 1]), y[0, :2], True),
    "scatter_": lambda out, y: out.scatter_(0, torch.zeros(4, 6).long(), y, reduce="add"),
    "scatter_add_": lambda out, y: out.scatter_add_(0, torch.zeros(4, 6).long(), y),
    "index_add_": lambda out, y: out.index_add_(0, torch.arange(4), y),
    "addmm_": lambda out, y: out.addmm_(y, y.T @ y),
}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", READ)
def test_memory_that_is_read_before_it_is_written_is_told(name: str, recorded: bool) -> None:
    grid = dc.ProcessGrid(width=-1)
    y = dc.distribute_tensor(torch.ones(4, 6), grid, dc.Layout(channel="width"))
    out = torch.full((4, 6), float(grid.rank))
    with torch.set_grad_enabled(recorded):
        y.requires_grad_(recorded)
        message = raised_everywhere(ValueError, lambda: READ[name](out, y))
    assert "a plain tensor, (4, 6) of float32, is not the same" in message
