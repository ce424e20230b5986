"""Forms of calls that serial torch takes are taken, and those that it refuses are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.tensor.recording import common_grid
from tests.support.serial import agrees, raises_alike, random_tensor

V = torch.arange(6.0, dtype=torch.float64)
X = random_tensor(random.Random(1), (4, 6))
PLANE = random_tensor(random.Random(2), (2, 3, 4, 6))
COLUMN = PLANE[..., :1]
COMPLEX = torch.complex(X, X.flip(0))
SCALAR, EMPTY = X[0, 0], X[:, :0]
COUNTS = torch.tensor([1, 2, 0, 1, 3, 1])
KERNEL = random_tensor(random.Random(3), (3, 3, 1, 1))
AROUND = torch.tensor([[0, 7, -1, -7, 2]])
Q = torch.tensor([0.2, 0.7], dtype=torch.float64)
WINDOW = torch.ones(4, dtype=torch.float64) + V[:4]
SPECTRA = torch.stft(X[:2], 4, window=WINDOW, return_complex=True)

TAKEN: dict[str, tuple[torch.Tensor, Callable[..., Any]]] = {
    "gradient without spacing": (X, lambda x: torch.gradient(x, dim=None, spacing=None)),
    "sum_to_size of a scalar": (X, lambda x: x.sum_to_size(())),
    "logsumexp of a scalar": (SCALAR, lambda x: torch.logsumexp(x, ())),
    "counts of a plain vector": (COUNTS, lambda n: torch.repeat_interleave(V, n)),
    "counts of plain rows": (COUNTS[:4], lambda n: X.repeat_interleave(n, dim=0)),
    "complex padding": (COMPLEX, lambda x: torch.constant_pad_nd(x, (1, 2), 1 + 2j).abs()),
    "a single class": (SCALAR, lambda x: F.multi_margin_loss(x, torch.tensor(0))),
    "a label as a vector": (V, lambda x: F.multi_margin_loss(x, torch.tensor([2]))),
    "a single label": (SCALAR, lambda x: F.multilabel_margin_loss(x, torch.tensor(0))),
    "roll of nothing": (EMPTY, lambda x: x.roll(1)),
    "reshape of nothing": (EMPTY, lambda x: x.reshape(0, 5)),
    "meshgrid of a list": (V, lambda x: torch.meshgrid([x, V[:2]], indexing="ij")),
    "meshgrid of a tuple": (V, lambda x: torch.meshgrid((x, V[:2]), indexing="xy")),
    "a list to one dimension": (V, lambda x: torch.atleast_1d([x, x[0]])),
    "a list to two dimensions": (V, lambda x: torch.atleast_2d([x, x[0]])),
    "a tuple to three dimensions": (V, lambda x: torch.atleast_3d((x, x[0]))),
    "bits as integers": (X, lambda x: x.view(torch.int64)),
    "bits by name": (X.float(), lambda x: x.view(dtype=torch.int32)),
    "bits as they are": (X, lambda x: x.view(torch.float64) * 2),
    "halves of numbers": (X, lambda x: x.view(torch.int32)),
    "pairs of numbers": (X.float(), lambda x: x.view(torch.int64)),
    "complex numbers as pairs": (COMPLEX, lambda x: x.view(torch.float64)),
    "bytes of all numbers": (X, lambda x: x.flatten().view(torch.uint8)),
    "bits of columns": (X, lambda x: x.t().reshape(3, 8).view(torch.int64)),
    "no differences": (V, lambda x: torch.diff(x, n=0, prepend=V, append=V)),
    "quantiles by a distributed q": (Q, lambda q: torch.quantile(X, q, 1)),
    "quantiles of all": (Q, lambda q: torch.nanquantile(X, q, keepdim=True)),
    "quantiles of a scalar": (SCALAR, lambda x: torch.nanquantile(x, Q, 0, True)),
    "positions around the end": (X, lambda x: torch.take_along_dim(x, AROUND, 1)),
    "no lower triangle": (X, lambda x: torch.tril(x, -(2**63)) + torch.triu(x, 2**63 - 1)),
    "a window of plain spectra": (WINDOW, lambda w: torch.istft(SPECTRA, 4, window=w)),
    "a value filled in": (SCALAR, lambda x: torch.index_fill(X, 1, COUNTS[:2], x)),
    "both triangles": (X, lambda x: torch.tril(x, 2**63 - 1) + torch.triu(x, -(2**63))),
}

REFUSED: dict[str, tuple[torch.Tensor, Callable[..., Any]]] = {
    "a dilation of -1": (COLUMN, lambda x: F.conv2d(x, KERNEL, dilation=-1)),
    "a stride of 0": (COLUMN, lambda x: F.conv2d(x, KERNEL, stride=0)),
    "a transposed dilation of 0": (COLUMN, lambda x: F.conv_transpose2d(x, KERNEL, dilation=0)),
    "a margin of 0": (X, lambda x: F.triplet_margin_loss(x, X, X + 1, margin=0)),
    "bounds in the wrong order": (X, lambda x: F.rrelu(x, 0.5, 0.1)),
    "bounds in training": (X, lambda x: F.rrelu(x, 0.5, 0.1, training=True)),
    "no channels": (PLANE[:, :0], lambda x: F.interpolate(x, scale_factor=2)),
    "cropped and wrapped": (X[None, :, :3], lambda x: F.pad(x[:, :1], (-2, 3), "circular")),
    "pairs of an odd number": (X[:, :5].float(), lambda x: x.view(torch.int64)),
    "halves of a scalar": (SCALAR, lambda x: x.view(torch.int32)),
    "a complex value among real": (X, lambda x: torch.constant_pad_nd(x, (1, 1), 2j)),
}


def _last_cut(x: torch.Tensor) -> dc.Layout:
    cuts = ((),) * (x.dim() - 1) + (("width",),) if x.dim() else ()
    return dc.Layout.of(cuts)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("name", TAKEN)
def test_what_serial_torch_takes_is_taken(name: str) -> None:
    x, function = TAKEN[name]
    grid = dc.ProcessGrid(width=-1)
    agrees(function, [x], [], grid, random.Random(0), [_last_cut(x)])


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("name", REFUSED)
def test_what_serial_torch_refuses_is_refused_on_every_rank(name: str) -> None:
    x, function = REFUSED[name]
    grid = dc.ProcessGrid(width=-1)
    raises_alike(function, [x], [], grid, random.Random(0), [_last_cut(x)])


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("cuts", [(("width",), ()), ((), ("width",))])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.complex128])
def test_bits_are_written_through_a_view_of_another_type(dtype: torch.dtype, cuts: Any) -> None:
    def function(x: torch.Tensor) -> Any:
        y = x.detach().clone()
        bits = y.view(dtype)
        bits[1:3, 1:].zero_()
        y[3] = 7.0
        return y, bits

    grid = dc.ProcessGrid(width=-1)
    agrees(function, [X], [], grid, random.Random(0), [dc.Layout.of(cuts)])


@pytest.mark.parallel([1, 2])
def test_pairs_of_results_are_written_to_pairs() -> None:
    grid = dc.ProcessGrid(width=-1)
    x = dc.distribute_tensor(X, grid, dc.Layout.of(((), ("width",))))
    values, places = x.amax(0) * 0, x.argmax(0) * 0
    found = torch.max(x, 0, out=(values, places))
    assert found[0] is values and found[1] is places
    for own, wanted in zip(found, torch.max(X, 0), strict=True):
        torch.testing.assert_close(own.full_tensor(), wanted)
    with pytest.raises(dc.UnsupportedOperation, match="out= must be a distributed tensor"):
        torch.max(x, 0, out=(values, torch.zeros(6, dtype=torch.int64)))


@pytest.mark.parallel([2])
def test_a_layout_that_a_plain_operand_decides_is_refused_by_name() -> None:
    with pytest.raises(dc.UnsupportedOperation, match=r"f: the operand \(4, 6\) that determines"):
        common_grid("f", [X])
