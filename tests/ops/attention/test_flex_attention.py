"""`flex_attention` equals serial torch's, with the numbers of the whole batch in its functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as of_torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import distconv as dc
from distconv.ops.attention import flex
from tests.support.arriving import arriving
from tests.support.serial import deviation, raised_everywhere
from tests.support.strategies import Case, on_any_grid, sizes

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:return_lse is deprecated"),
]


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Let torch compute without the compiler, and also gradients, which it refuses on CPUs."""
    with (
        mock.patch.object(of_torch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        mock.patch.object(of_torch, "_validate_device", lambda *_: None),
    ):
        yield


def _weights(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).sin().view(shape)


@on_any_grid(25, more=[3])
def test_flex_attention_equals_serial(case: Case) -> None:
    keys, groups = case.draw(sizes(1, 4)), case.draw(sizes(1, 3))
    batch, features = case.draw(sizes(1, 3)), case.draw(sizes(1, 4))
    rows, columns, values = (case.draw(sizes(1, 13)) for _ in range(3))
    heads = keys * groups
    bias, slopes = _weights(heads, rows, columns), _weights(batch)
    masked, scored = case.flag(), case.flag()
    mask: Any = None
    if masked:
        mask = create_block_mask(
            lambda b, h, q, k: (q + b >= k) | ((h + k) % 3 == 0),
            case.one_of(batch, 1),
            case.one_of(heads, 1),
            rows,
            columns,
            device="cpu",
            BLOCK_SIZE=case.one_of(1, 2, 4, 16),
        )
        if mask.shape[0] == 1 or mask.shape[1] == 1:
            mask.mask_mod = lambda b, h, q, k: (q >= k) | (k % 3 == 0)
    shared = batch if mask is None or mask.shape[0] < batch else case.one_of(batch, 1)
    tensors = [
        case.tensor([batch, heads, rows, features]),
        case.tensor([shared, keys, columns, features]),
        case.tensor([shared, keys, columns, values]),
    ]
    lse = case.flag()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(
            q,
            k,
            v,
            (lambda s, b, h, q, k: s * slopes[b] + bias[h, q, k]) if scored else None,
            mask,
            case_scale,
            groups > 1,
            lse,
        )

    case_scale = case.one_of(None, 0.3)
    # Of one key the weight is 1, and the gradient rounding.
    with _uncompiled():
        case.agrees(attention, *tensors, cut=[0, 1, 2], frozen=[0, 1] if columns == 1 else [])


@on_any_grid(10, more=[3])
def test_flex_attention_between_the_positions_of_planes_equals_serial(case: Case) -> None:
    heads, features, batch = case.draw(sizes(1, 3)), case.draw(sizes(1, 3)), case.draw(sizes(1, 3))
    plane = [batch, heads * features, case.draw(sizes(2, 6)), case.draw(sizes(1, 6))]
    n = plane[2] * plane[3]
    bias = _weights(n, n)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, n, n, "cpu", BLOCK_SIZE=4)

    def attention(*planes: Tensor) -> Any:
        q, k, v = (x.flatten(2).unflatten(1, (heads, -1)).transpose(-2, -1) for x in planes)
        return flex_attention(q, k, v, lambda s, b, h, q, k: s + bias[q, k] * (b + h), mask)

    tensors = [case.tensor(plane) for _ in range(3)]
    layout = case.layout(plane)
    if case.flag():
        case.layout = lambda _: layout  # type: ignore[method-assign]
    with _uncompiled():
        case.agrees(attention, *tensors, cut=[0, 1, 2])


ROWS, HEADS, SAMPLES = (dc.Layout(**{d: "height"}) for d in ("height", "channel", "sample"))


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize(
    ("layout", "shape", "moved"),
    [(SAMPLES, (4, 1, 8, 4), 0), (HEADS, (1, 4, 8, 4), 0), (ROWS, (1, 4, 8, 4), 4)],
)
def test_heads_and_samples_need_no_message_and_positions_an_all_to_all(
    layout: dc.Layout, shape: tuple[int, ...], moved: int
) -> None:
    grid = dc.ProcessGrid(height=-1)
    q, k, v = (dc.distribute_tensor(torch.ones(shape), grid, layout) for _ in range(3))
    with _uncompiled(), arriving(grid) as arrived:
        flex_attention(q, k, v)
    n = grid.size
    assert sum(arrived) == moved * (n - 1) / n**2 * q.nbytes


@pytest.mark.parallel([2])
def test_programs_that_torch_compiles_call_flex_attention_on_partitioned_tensors() -> None:
    grid = dc.ProcessGrid(height=-1)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 3, 20, 16, generator=generator) for _ in range(3)]
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 20, 20, "cpu", BLOCK_SIZE=8)

    def attention(*operands: Tensor) -> Any:
        return flex_attention(*operands, lambda s, b, h, q, k: s * (h + 1), mask)

    expected = attention(*given)
    plain = torch.compile(attention, fullgraph=True, backend="eager")(*given)
    assert deviation(plain, expected) < 1e-5
    tensors = [dc.distribute_tensor(x, grid, ROWS) for x in given]
    assert deviation(torch.compile(attention, backend="eager")(*tensors), expected) < 1e-5
    compiled: list[Any] = []

    def compile_blocks() -> Any:
        compiled.append(torch.compile(flex.flex_attention_of_torch, backend="eager"))
        return compiled[0]

    with (
        mock.patch.object(flex, "is_accelerator", lambda _: True),
        mock.patch.object(flex, "_compiled", compile_blocks),
    ):
        assert deviation(attention(*tensors), expected) < 1e-5
    assert compiled


class _Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x.flatten(2).unflatten(1, (4, -1)).mT
        out, lse = flex_attention(q, q, q, lambda s, b, h, i, j: s + h, return_lse=True)
        return out + lse[..., None]


@pytest.mark.parallel([2])
def test_explain_counts_the_messages_of_flex_attention() -> None:
    grid = dc.ProcessGrid(height=-1)
    plan = dc.explain(_Layer(), (1, 8, 4, 4), grid, show=False)
    moved = [r for layer in plan.layers for r in layer.redistributions]
    assert sum(r.bytes for r in moved) == (4 * 8 + 4) * 16 * 4 / 4, moved


@pytest.mark.parallel([2, 3, 4])
def test_one_query_is_on_one_rank_and_the_others_have_none() -> None:
    grid = dc.ProcessGrid(height=-1)
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 2, dtype=torch.float64, generator=rng) for n in (1, 6, 6))
    with _uncompiled():
        expected = flex_attention(q, k, v)
        found = flex_attention(*(dc.distribute_tensor(x, grid, ROWS) for x in (q, k, v)))
    assert isinstance(found, dc.DistTensor)
    torch.testing.assert_close(found.full_tensor(), expected)


@pytest.mark.parallel([1, 2, 3])
def test_what_flex_attention_does_not_support_raises_on_every_rank() -> None:
    grid = dc.ProcessGrid(height=-1)
    whole = torch.ones(2, 2, 6, 4)
    x = dc.distribute_tensor(whole, grid, ROWS)
    bias = dc.distribute_tensor(torch.ones(6, 6), grid, dc.Layout(sample="height"))
    learned = torch.ones(6, 6, requires_grad=True)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, 2, 8, 6, "cpu", BLOCK_SIZE=4)
    plus = [lambda s, b, h, q, k, of=of: s + of[q, k] for of in (bias, learned)]
    hidden = {"in a module of its own": nn.ParameterList([learned])}
    deep = [lambda s, b, h, q, k: s + hidden["in a module of its own"][0][q, k]]
    with _uncompiled():
        for error, kind, options in (
            (dc.UnsupportedOperation, "score_mod reads a distributed", dict(score_mod=plus[0])),
            (dc.UnsupportedOperation, "would not be summed", dict(score_mod=plus[1])),
            (dc.UnsupportedOperation, "would not be summed", dict(score_mod=deep[0])),
            (ValueError, "block_mask has the shape (1, 2, 8, 6)", dict(block_mask=mask)),
        ):
            report = raised_everywhere(error, partial(flex_attention, **options), x, x, x)
            assert kind in report
        for others in ((x[:, :1],) * 2, (x[:1],) * 2, (x[..., :2], x), (x[0],) * 2):
            raised_everywhere((ValueError, NotImplementedError), flex_attention, x, *others)
        with torch.no_grad():
            flex_attention(x, x, x, plus[1])
    q = dc.distribute_tensor(whole, grid, ROWS).requires_grad_()
    report = raised_everywhere(NotImplementedError, flex_attention, q, x, x)
    assert grid.device.type != "cpu" or "does not support backward on CPU" in report
