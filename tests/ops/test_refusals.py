"""What serial torch refuses, and what has no rule, is refused on all ranks before any message."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distconv as dc
from tests.support.serial import raises_alike, random_grid, random_layout, random_tensor, refused

HUGE = 2**63 - 1
KERNEL = random_tensor(random.Random(9), (4, 4, 3, 3))
MATRIX = torch.ones(4, 3, dtype=torch.float64)
LABELS = torch.zeros(2, 4, 1, dtype=torch.int64)

RAISED: dict[str, tuple[Tensor, list[Callable[[Any], Any]]]] = {
    "shapes": (
        random_tensor(random.Random(8), (2, 3, 4, 5)),
        [
            lambda x: x.reshape(7, -1),
            lambda x: x.view(-1, -1),
            lambda x: x.flatten(2, 1),
            lambda x: x.unflatten(1, (2, 2)),
            lambda x: x.unsqueeze(6),
            lambda x: x.squeeze(4),
            lambda x: x.permute(0, 1, 2),
            lambda x: x.permute(0, 0, 1, 2),
            lambda x: x.transpose(0, 5),
            lambda x: x.expand(2, 3, 4, 6),
            lambda x: x[4],
            lambda x: x[0, 0, 0, 0, 0],
            lambda x: x[::-1],
            lambda x: x[:, 3],
            lambda x: x[::0],
            lambda x: x.narrow(1, 2, 2),
            lambda x: x.select(0, 2),
            lambda x: x.split(0),
            lambda x: x.split([1, 2]),
            lambda x: x.chunk(0),
            lambda x: torch.cat([x, torch.ones(2, 3, 4, 6).double()]),
            lambda x: torch.cat([x, x[0]]),
            lambda x: torch.cat([x, x], 4),
            lambda x: torch.stack([x, torch.ones(2, 3, 4, 6)]),
            lambda x: F.pixel_shuffle(x, 2),
            lambda x: F.pixel_unshuffle(x, 2),
            lambda x: F.pad(x, (1,)),
            lambda x: F.pad(x, (5, 0, 0, 0), "reflect"),
            lambda x: F.pad(x, (-6, 0)),
            lambda x: F.pad(x, (1, 1), "mirror"),
            lambda x: F.pad(x, (0, 0, 1, 1), "reflect", 1.0),
            lambda x: F.pad(x, (6, 0, 0, 0), "circular"),
        ],
    ),
    "sums": (
        random_tensor(random.Random(2), (2, 3, 4, 5)),
        [
            lambda x: x.sum(4),
            lambda x: x.sum((0, 0)),
            lambda x: x.mean(-5),
            lambda x: x.long().mean(),
            lambda x: x.mean(dtype=torch.int64),
            lambda x: x.sum("height"),
            lambda x: x.sum(1.5),
        ],
    ),
    "positions": (
        random_tensor(random.Random(5), (4, 5)),
        [
            lambda x: x.index_select(0, torch.tensor([1.0])),
            lambda x: x.index_select(0, torch.tensor([[1]])),
            lambda x: x.index_select(2, torch.tensor([1])),
            lambda x: torch.gather(x, 0, torch.tensor([0, 1])),
            lambda x: torch.gather(x, 1, torch.zeros(5, 1, dtype=torch.int64)),
            lambda x: torch.take_along_dim(x, torch.tensor([0, 1]), 1),
            lambda x: torch.take_along_dim(x, torch.tensor([[0, 1]]), 0),
            lambda x: x[0, 0, torch.tensor([0])],
        ],
    ),
    "embeddings": (
        torch.zeros(4, 5, dtype=torch.int64),
        [
            lambda i: F.embedding(i.float(), torch.ones(4, 5)),
            lambda i: F.embedding(i, torch.ones(4)),
        ],
    ),
    "products": (
        torch.ones(4, 5),
        [
            lambda x: torch.addmm(torch.ones(4, 3), x, x),
            lambda x: torch.addmm(torch.ones(3, 4), x, x.t()),
            lambda x: torch.addmm(torch.ones(4, 4).double(), x, x.t()),
            lambda x: x.addmv(x, x),
            lambda x: x.addmm(x),
            lambda x: x.addmm(x, mat1=x, mat2=x),
        ],
    ),
    "element-wise": (
        torch.ones(4, 6),
        [
            lambda x: x + torch.ones(4, 5),
            lambda x: x.add_(torch.ones(2, 4, 6)),
            lambda x: torch.bitwise_and(x, x),
            lambda x: x.detach().requires_grad_().add_(1),
            lambda x: F.dropout(x, 1.5, training=False),
            lambda x: F.prelu(x, torch.ones(3)),
            lambda x: torch.lerp(x, x, x.double()),
            lambda x: x.clamp(),
            lambda x: x.to("no type"),
            lambda x: torch.where(x, x, x),
            lambda x: x.new_zeros(3, -1),
        ],
    ),
    "windows": (
        random_tensor(random.Random(2), (2, 2, 5, 5)),
        [
            lambda x: F.max_pool2d(x, 3, padding=2),
            lambda x: F.max_pool2d(x, 3, stride=0),
            lambda x: F.max_pool2d(x, 9),
            lambda x: F.max_pool2d(x, (2, 2, 2)),
            lambda x: F.max_pool2d(x, 2, padding=-1),
            lambda x: F.avg_pool2d(x, 3, padding=2),
            lambda x: F.avg_pool2d(x, 2, divisor_override=0),
            lambda x: F.adaptive_avg_pool2d(x, (2, 2, 2)),
            lambda x: F.adaptive_avg_pool2d(x, (2, -1)),
        ],
    ),
    "convolutions": (
        random_tensor(random.Random(3), (2, 4, 8, 6)),
        [
            lambda x: F.conv2d(x, KERNEL, padding=-1),
            lambda x: F.conv_transpose2d(x, KERNEL, padding=-1),
            lambda x: F.conv2d(x, KERNEL, stride=0),
            lambda x: F.max_pool2d(x, 2, HUGE),
            lambda x: x.repeat(1, 1.5, 1, 1),
            lambda x: x.repeat(1, torch.tensor(1.5), 1, 1),
            lambda x: x.expand(2, 4, 8.5, 6),
            lambda x: x.softmax(dim={}),
            lambda x: F.dropout(x, training={}),
            lambda x: F.dropout(x, training=1),
            lambda x: F.glu(x, dim=True),
            lambda x: x.split(2, dim=True),
            lambda x: x.split(True, 1),
            lambda x: x.split(2**70),
            lambda x: x.chunk(2**70),
            lambda x: F.adaptive_avg_pool2d(x, None),
            lambda x: F.adaptive_avg_pool2d(x, True),
            lambda x: F.adaptive_max_pool2d(x, None),
            lambda x: F.adaptive_avg_pool2d(x, HUGE),
        ],
    ),
    "batch norm": (
        random_tensor(random.Random(8), (2, 3, 1)),
        [
            lambda x: F.batch_norm(x, None, None, training=False),
            lambda x: F.batch_norm(
                x, torch.zeros(4).double(), torch.ones(4).double(), training=True
            ),
            lambda x: F.batch_norm(x, None, None, torch.ones(4).double(), training=True),
            lambda x: F.batch_norm(x, None, None, training=True, eps=0.0),
            lambda x: nn.BatchNorm1d(3)(x),
            lambda x: nn.BatchNorm3d(3).double()(x),
        ],
    ),
    "one value per channel": (
        random_tensor(random.Random(9), (1, 5, 1)),
        [lambda x: F.batch_norm(x, None, None, training=True)],
    ),
    "losses": (
        random_tensor(random.Random(8), (2, 3, 4, 1)),
        [
            lambda x: F.mse_loss(x, torch.ones(2, 2, 4, 1)),
            lambda x: F.mse_loss(x, x, reduction="average"),
            lambda x: F.mse_loss(x, x, weight=torch.ones(3)),
            lambda x: F.smooth_l1_loss(x, x, beta=-1.0),
            lambda x: F.huber_loss(x, x, delta=0.0),
            lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones(1, 3, 4, 1).double()),
            lambda x: F.binary_cross_entropy_with_logits(x, x, weight=torch.ones(5)),
            lambda x: F.binary_cross_entropy_with_logits(x, x, pos_weight=torch.ones(5)),
            lambda x: F.cross_entropy(x, torch.zeros(2, 4, dtype=torch.int64)),
            lambda x: F.cross_entropy(x, torch.zeros(2, 4, 1)),
            lambda x: F.cross_entropy(x, torch.zeros(2, 3, 4, 1, dtype=torch.int64)),
            lambda x: F.cross_entropy(x, LABELS, torch.ones(4).double()),
            lambda x: F.cross_entropy(x, LABELS, label_smoothing=1.5),
            lambda x: F.cross_entropy(x, LABELS, reduction="all"),
            lambda x: F.cross_entropy(x, x, ignore_index=0),
            lambda x: F.nll_loss(x, x),
            lambda x: F.cross_entropy(x, LABELS.byte()),
        ],
    ),
    "rows": (
        random_tensor(random.Random(7), (2, 3, 5)),
        [
            lambda x: x[:0].max(),
            lambda x: x[:0].argmax(),
            lambda x: x[:0].max(0),
            lambda x: x.clone().uniform_(2, 1),
            lambda x: x.long().uniform_(),
            lambda x: x.clone().normal_(0, -1),
            lambda x: torch.bernoulli(x, 1.5),
            lambda x: x.clone().bernoulli_(torch.ones(4) / 2),
            lambda x: torch.bernoulli(x.long()),
            lambda x: torch.randint_like(x, 5, 5),
            lambda x: torch.randn_like(x, dtype=torch.int64),
            lambda x: (x > 0).argmax(),
            lambda x: F.batch_norm(x, None, None, training=True, momentum=None),
            lambda x: F.batch_norm(x, torch.zeros(3), None, training=True),
            lambda x: F.instance_norm(x, momentum=None),
            lambda x: F.instance_norm(x, torch.zeros(3).double()),
            lambda x: x.narrow(0, torch.tensor(True), 1),
            lambda x: x.split([3, -1]),
            lambda x: x.repeat(2),
            lambda x: x.repeat(-1, 1, 1),
            lambda x: x.permute(()),
            lambda x: F.conv_transpose1d(x, torch.ones(3, 1, 1).double(), output_padding=1),
            lambda x: F.conv_transpose1d(x, torch.ones(3, 1, 1).double(), padding=3),
            lambda x: F.interpolate(x, scale_factor=0.1, mode="linear"),
            lambda x: F.interpolate(x.long(), size=3),
            lambda x: F.pad(x > 0, (1, 1), mode="replicate"),
            lambda x: F.pad(x > 0, (1, 1), mode="reflect"),
            lambda x: F.avg_pool3d(x.bfloat16()[None], 1),
            lambda x: F.avg_pool1d(x.byte(), 2),
            lambda x: F.adaptive_max_pool1d(x.long(), 2),
            lambda x: x.norm(dim=(0, 1, 2)),
            lambda x: F.lp_pool1d(x, 2, (2,)),
            lambda x: x.softmax(0, dtype=torch.int64),
            lambda x: F.gaussian_nll_loss(x, x, -1.0),
            lambda x: F.adaptive_avg_pool1d(x, -1),
        ],
    ),
    "a number": (torch.tensor(1.0), [torch.flipud, lambda x: torch.cat([x, x])]),
    "masks": (
        MATRIX,
        [
            lambda x: x[MATRIX[:3] > 0],
            lambda x: x[x.unsqueeze(0) > 0],
            lambda x: x.masked_select(MATRIX),
            lambda x: x.clone().__setitem__(x == x, x.float().flatten()),
            lambda x: x.__setitem__(MATRIX[:, :2] > 0, 1.0),
            lambda x: x.__setitem__(MATRIX[:1] > 0, 1.0),
            lambda x: x.__setitem__(MATRIX.unsqueeze(0) > 0, 1.0),
            lambda x: x.__setitem__(x > 0, 1.0j),
            lambda x: x.detach().requires_grad_().__setitem__(x > 0, 1.0),
        ],
    ),
}
"""Calls that serial torch refuses, by what they are about, on a tensor."""

WITHOUT_RULE: dict[str, tuple[Tensor, list[Callable[[Any], Any]]]] = {
    "shapes": (
        random_tensor(random.Random(9), (4, 6)),
        [
            lambda x: x[True],
            lambda x: x.as_strided((2, 2), (1, 1)),
            lambda x: x[..., ..., 0],
        ],
    ),
    "results in memory that is given": (
        torch.ones(4, 6),
        [
            lambda x: torch.cat([x, x], out=torch.empty(1)),
            lambda x: torch.exp(x, out=torch.empty(4, 6)),
            lambda x: torch.add(torch.ones(4, 6), 1, out=x),
            lambda x: torch.sum(x, 0, out=torch.empty(6)),
            lambda x: torch.mm(x, x.t(), out=torch.empty(4, 4)),
            lambda x: F.normalize(x, out=torch.empty(4, 6)),
        ],
    ),
    "sparse": (torch.ones(4, 4), [lambda x: torch.eye(4).to_sparse() + x]),
    "options of embeddings": (
        torch.zeros(4, 5, dtype=torch.int64),
        [
            lambda i: F.embedding(i, torch.ones(4, 5), max_norm=1.0),
            lambda i: F.embedding(i, torch.ones(4, 5), scale_grad_by_freq=True),
            lambda i: F.embedding(i, torch.ones(4, 5), sparse=True),
        ],
    ),
    "broken multiples of integers": (
        torch.ones(4, 4, dtype=torch.int64),
        [lambda x: torch.addmm(x, x, x, alpha=0.5), lambda x: torch.addmm(x, x, x, beta=0.5)],
    ),
}
"""Calls that serial torch takes, and for which there is no rule."""


def cases(table: dict[str, tuple[Tensor, list[Callable[[Any], Any]]]]) -> list[Any]:
    return [
        pytest.param(x, call, id=f"{name} {place}")
        for name, (x, calls) in table.items()
        for place, call in enumerate(calls)
    ]


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(("x", "call"), cases(RAISED))
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_what_serial_torch_refuses_is_refused_on_all_ranks(
    x: Tensor, call: Callable[[Any], Any]
) -> None:
    rng = random.Random(8)
    grid = random_grid(rng)
    for layout in (dc.Layout(), random_layout(rng, grid, x.shape)):
        raises_alike(call, [x], [], grid, rng, [layout])


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(("x", "call"), cases(WITHOUT_RULE))
def test_what_has_no_rule_is_refused_on_all_ranks(x: Tensor, call: Callable[[Any], Any]) -> None:
    rng = random.Random(9)
    refused(call, [x], [], random_grid(rng), rng)
