"""Reshapes that merge cut dimensions: what works on them as they lie, what brings their blocks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import distconv as dc
from tests.support.serial import agrees, deviation, random_grid, random_tensor

C, H, W = 6, 8, 4


def tokens(x: Tensor) -> Tensor:
    """The positions of all samples, (sample * height * width, channel)."""
    return x.permute(0, 2, 3, 1).reshape(-1, C)


def windows(x: Tensor) -> Tensor:
    """Windows of 2 x 2 positions, (window, position, channel), as Swin transformers have them."""
    n = x.shape[0]
    rows = x.permute(0, 2, 3, 1).view(n, H // 2, 2, W // 2, 2, C)
    return rows.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 4, C)


def back(w: Tensor) -> Tensor:
    rows = w.view(-1, H // 2, W // 2, 2, 2, C).permute(0, 1, 3, 2, 4, 5)
    return rows.reshape(-1, H, W, C).permute(0, 3, 1, 2)


def attention(w: Tensor, weight: Tensor) -> Tensor:
    """Self-attention of two heads within windows."""
    n, positions, _ = w.shape
    qkv = F.linear(w, weight).reshape(n, positions, 3, 2, C // 2).permute(2, 0, 3, 1, 4)
    q, k, v = qkv[0], qkv[1], qkv[2]
    scores = (q @ k.transpose(-2, -1) * C**-0.5).softmax(-1)
    return (scores @ v).transpose(1, 2).reshape(n, positions, C)


def masked(w: Tensor, weight: Tensor) -> Tensor:
    """Attention with a mask of its own for each window of a sample."""
    n = H * W // 4
    mask = torch.arange(4.0 * 4 * n, dtype=w.dtype).view(n, 1, 4, 4).cos()
    q = F.linear(w, weight[:C]).view(-1, 4, 2, C // 2).transpose(1, 2)
    scores = q @ q.transpose(-2, -1)
    scores = scores.view(-1, n, 2, 4, 4) + mask
    return (scores.view(-1, 2, 4, 4).softmax(-1) @ q).transpose(1, 2).reshape(-1, 4, C)


def scaled(w: Tensor) -> Tensor:
    """The first of three parts, written to in place while the others are in use."""
    parts = w.sin().reshape(-1, 4, 3, 2).permute(2, 0, 1, 3)
    first, second, _ = parts[0], parts[1], parts[2]
    first *= 2
    return first.square() * second + parts.sum(0)


def partly(w: Tensor, value: Tensor) -> Tensor:
    """Windows of which some positions are scaled, and others are something else."""
    w = w.cos()
    w[:, 1:3] *= 2
    w[..., 0] = value
    w[:, 3, 1:3] = -1.0
    w[:, :1, 2:] = w[:, 2:3, 2:].exp()
    return w


def pooled(samples: Tensor) -> Tensor:
    """Pooling over the last dimension of merged samples, with and without places of maxima."""
    most, where = F.max_pool1d(samples, 2, 1, return_indices=True)
    other, there = F.adaptive_max_pool1d(samples, 2, return_indices=True)
    averages = F.adaptive_avg_pool1d(samples, 2) * F.adaptive_max_pool1d(samples, 2)
    return most * where + other * there + averages


def divided(w: Tensor) -> Tensor:
    """Products of parts of windows along each of the dimensions that are whole."""
    (first, rest), parts = w.split([1, 3], 1), w.chunk(4, 2)
    return first * rest.sin() * (parts[0] * parts[2]).sum() + sum(w.cos().unbind(1))[:, None]


_ROW = torch.ones(1, C * H * W, dtype=torch.float64).cumsum(1).cos()
SHIFT = torch.linspace(-1, 1, C, dtype=torch.float64)

LOCAL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "element-wise": lambda x, w: (tokens(x).sin() * SHIFT + w[:1, :C]).exp(),
    "of two": lambda x, w: back(windows(x) + windows(x.cos()) * tokens(x).view(-1, 4, C).mean()),
    "in place": lambda x, w: back(windows(x).clone().mul_(w[0]).relu_()),
    "linear and norm": lambda x, w: F.layer_norm(F.linear(tokens(x), w), (3 * C,)),
    "softmax": lambda x, w: back(windows(x).softmax(-1).log_softmax(1)),
    "shape": lambda x, w: windows(x).transpose(0, 2)[1:3].unsqueeze(1).expand(2, 5, 4, -1),
    "slices": lambda x, w: torch.cat([windows(x)[:, :2], windows(x)[:, 1:], windows(x)], 1),
    "chunks": lambda x, w: back(torch.stack(windows(x).chunk(2, 1), 1).flatten(1, 2)),
    "parts": lambda x, w: divided(windows(x)),
    "pooling": lambda x, w: pooled(tokens(x).view(-1, 2, 3)),
    "sums": lambda x, w: tokens(x).sum(0) + windows(x).mean((0, 1)) + tokens(x).amax(0),
    "spread": lambda x, w: tokens(x).std(0) * tokens(x).norm(dim=1).sum() + x.flatten().var(),
    "batch norm": lambda x, w: F.batch_norm(tokens(x), None, None, SHIFT, training=True),
    "group norm": lambda x, w: F.group_norm(x.flatten(2), 2),
    "windows and back": lambda x, w: back(windows(x)),
    "attention": lambda x, w: back(attention(windows(x), w)),
    "attention with masks": lambda x, w: back(masked(windows(x), w)),
    "channels' products": lambda x, w: x.flatten(2) @ x.flatten(2).transpose(1, 2),
    "einsum": lambda x, w: torch.einsum("wpc,wqc->wpq", windows(x), windows(x).tanh()),
    "a convolution of windows": lambda x, w: F.conv1d(windows(x), w[:2, :4, None], w[0, :2]),
    "a few results of all positions": lambda x, w: F.linear(x.flatten(1), _ROW * w[0, 0], w[0, :1]),
    "distances": lambda x, w: torch.cdist(tokens(x), w).argmin(1).view(-1, H, W) * x.sum(),
    "embedding": lambda x, w: F.embedding(tokens(x).abs().argmax(1), w).view(-1, H, W, C),
    "rows at positions": lambda x, w: w[windows(x).abs().argmax(2)] * x.sum(),
    "parts in place": lambda x, w: scaled(windows(x)),
    "written in part": lambda x, w: back(partly(windows(x), w[0, 0])),
    "no gradient": lambda x, w: tokens(x).detach().to(torch.float32).double() + tokens(x),
}
"""Of (sample, C, H, W), cut in space, and a weight of (3 * C, C): nothing is redistributed."""

BROUGHT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a slice of merged rows": lambda x, w: tokens(x)[1::2],
    "a sum along them": lambda x, w: tokens(x).cumsum(0),
    "a softmax along them": lambda x, w: tokens(x).softmax(0),
    "factors that do not fit": lambda x, w: tokens(x).view(-1, 3)[:8] * x.flatten(1)[:, :3].sum(),
    "merged rows written": lambda x, w: _written(tokens(x).clone()),
    "positions": lambda x, w: tokens(x)[torch.tensor([3, 1, 3])],
    "used before and after": lambda x, w: (lambda t: t.sin() + t.cumsum(0) + t)(tokens(x)),
    "scaled_dot_product_attention": lambda x, w: _heads(x, is_causal=False),
    "attention to those before": lambda x, w: _heads(x, is_causal=True),
    "attention with a mask": lambda x, w: _heads(x, attn_mask=_MASK),
    "a layer along positions": lambda x, w: F.linear(
        x.flatten(2), torch.ones(H * W, H * W, dtype=x.dtype).cumsum(1).sin(), _MASK[0]
    ).view_as(x),
    "another number of results": lambda x, w: F.linear(tokens(x).t(), _MASK[:9].repeat(1, 2)),
    "a convolution along positions": lambda x, w: F.conv1d(x.flatten(2), w[:2, :, None]),
}


_MASK = torch.arange(H * W * H * W, dtype=torch.float64).view(H * W, H * W).sin()


def _heads(x: Tensor, **how: object) -> Tensor:
    q = x.flatten(2).transpose(1, 2).view(-1, H * W, 2, C // 2).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, q.sin(), q.cos(), **how)
    return out.transpose(1, 2).reshape(x.shape[0], H, W, C)


def _written(x: Tensor) -> Tensor:
    x[2:5] = 7.0
    return x * 2


def of_space(rng: random.Random) -> dc.ProcessGrid:
    return random_grid(rng, ("height", "width"))


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("name", LOCAL)
def test_what_treats_merged_rows_alike_moves_nothing(name: str) -> None:
    rng = random.Random(5)
    for _ in range(2):
        grid = of_space(rng)
        x, weight = random_tensor(rng, (2, C, H, W)), random_tensor(rng, (3 * C, C))
        layout = dc.Layout(height="height", width="width")
        agrees(LOCAL[name], [x], [weight], grid, rng, [layout])
        cut = dc.distribute_tensor(x, grid, layout)
        dc.redistributions(reset=True)
        LOCAL[name](cut, weight)
        if grid.size != 3:  # where blocks of windows are not whole, attention masks are brought
            assert dc.redistributions(reset=True) == []


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("name", [n for n in (*LOCAL, *BROUGHT) if n != "parts in place"])
def test_merged_tensors_equal_serial_in_any_layout(name: str) -> None:
    rng = random.Random(6)
    function = (LOCAL | BROUGHT)[name]
    for _ in range(2):
        x, weight = random_tensor(rng, (2, C, H, W)), random_tensor(rng, (3 * C, C))
        agrees(function, [x], [weight], random_grid(rng), rng)


def _merged() -> tuple[Tensor, dc.DistTensor]:
    """A tensor and its distributed twin, whose tokens are merged where there are several ranks."""
    x = random_tensor(random.Random(7), (2, C, H, W))
    return x, dc.distribute_tensor(x, dc.ProcessGrid(height=-1))


@pytest.mark.parallel([2, 4])
def test_gradients_of_a_merged_tensor_count_all_that_is_made_of_it() -> None:
    def gradients(x: Tensor) -> list[Tensor | None]:
        x.requires_grad_()
        rows = tokens(x)
        first = rows.sin()  # before anybody asks for the gradient, and for the block
        rows.retain_grad()
        seen: list[Tensor] = []
        rows.register_hook(lambda g: seen.append(g.clone()) or 2 * g)
        loss = (first * rows.cumsum(0)).sum() + x.sum()
        (alone,) = torch.autograd.grad(loss, [rows], retain_graph=True)
        loss.backward()
        return [alone, *seen, rows.grad, x.grad]

    serial, cut = _merged()
    for got, wanted in zip(gradients(cut), gradients(serial), strict=True):
        assert deviation(got.full_tensor(), wanted) < 1e-12


@pytest.mark.parallel([2, 4])
def test_a_block_is_brought_once_with_the_gradients_of_when_it_was_made() -> None:
    _, x = _merged()
    x.requires_grad_()
    rows = tokens(x)
    dc.redistributions(reset=True)
    with torch.no_grad():
        assert rows.to_local().requires_grad
        rows.cumsum(0)
    (moved,) = dc.redistributions(reset=True)
    assert (moved.operator, moved.times) == ("reshape", 1)
    assert rows.grid_layout == dc.Layout() and rows.requires_grad and not rows.is_leaf


@pytest.mark.parallel([2])
def test_a_merged_tensor_changes_its_shape_in_place() -> None:
    serial, cut = _merged()
    for x in (serial, cut):
        x = tokens(x)
        x.unsqueeze_(0).transpose_(0, 1)
        assert x.shape == (2 * H * W, 1, C)
        results = x.clone()
        if isinstance(x, dc.DistTensor):
            assert torch.equal(results.full_tensor(), tokens(serial).unsqueeze(1))
            assert "shape=(64, 1, 6)" in repr(x)


@pytest.mark.parallel([2])
def test_dropout_of_a_merged_tensor_draws_the_numbers_of_its_positions() -> None:
    _, cut = _merged()
    whole = cut.redistribute(dc.Layout())
    torch.manual_seed(1)
    rows = F.dropout(tokens(cut), 0.4)
    torch.manual_seed(1)
    assert torch.equal(rows.full_tensor(), F.dropout(tokens(whole), 0.4).full_tensor())
    looked_at = tokens(cut.clone())
    looked_at.to_local()
    torch.manual_seed(1)
    F.dropout(looked_at, 0.4, inplace=True)
    assert torch.equal((looked_at * 1).full_tensor(), rows.full_tensor())


@pytest.mark.parallel([2])
def test_a_block_that_is_looked_at_in_inference_mode_keeps_its_gradients() -> None:
    serial, cut = _merged()
    gradients = []
    for x in (serial, cut):
        x.requires_grad_()
        rows = tokens(x)
        if isinstance(rows, dc.DistTensor):
            with torch.inference_mode():
                rows.to_local()
        (rows.cumsum(0).square().sum() + rows.sum()).backward()
        gradients.append(x.grad)
    assert deviation(gradients[1].full_tensor(), gradients[0]) < 1e-12


@pytest.mark.parallel([2])
def test_a_merged_tensor_is_broadcast_to_no_elements() -> None:
    _, x = _merged()
    column = tokens(x)[:, :1]
    assert (column + torch.ones(0, dtype=x.dtype)).shape == (2 * H * W, 0)
    assert (tokens(x) @ torch.ones(C, 0, dtype=x.dtype)).shape == (2 * H * W, 0)


@pytest.mark.parallel([2])
def test_a_gradient_that_is_set_on_a_merged_tensor_is_there() -> None:
    _, x = _merged()
    rows = tokens(x)
    rows.grad = rows.cos()
    assert rows.grad is not None
    assert torch.equal(rows.grad.full_tensor(), rows.cos().full_tensor())


@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    "merge", [tokens, lambda x: x.permute(0, 2, 3, 1).flatten(0, 2), lambda x: tokens(x).detach()]
)
@pytest.mark.parametrize("write", [lambda rows: rows.mul_(2), lambda rows: F.relu(rows, True)])
def test_what_serial_torch_may_have_copied_is_not_written_in_place_of_a_copy(
    merge: Callable[[Tensor], Tensor], write: Callable[[Tensor], Tensor]
) -> None:
    serial, cut = _merged()
    with pytest.raises(dc.UnsupportedOperation, match="while another view"):
        write(merge(cut))
    assert torch.equal(cut.full_tensor(), serial)
    rows = merge(cut.clone())
    assert torch.equal(write(rows).full_tensor(), write(merge(serial.clone())))
    assert torch.equal(rows.full_tensor(), write(merge(serial.clone())))


@pytest.mark.parallel([2])
def test_what_is_written_to_the_box_of_a_merged_tensor_is_its_own() -> None:
    _, cut = _merged()
    rows = tokens(cut.clone())
    rows.to_local().fill_(3.0)
    assert (rows.full_tensor() == 3).all() and ((rows * 2).full_tensor() == 6).all()
