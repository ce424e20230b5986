"""Changes of shape, slices, concatenation, padding and pixel shuffle equal serial ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distconv as dc
from tests.support.serial import (
    agrees,
    examples,
    noted,
    raises_alike,
    random_grid,
    random_layout,
    random_tensor,
    refused,
)

RANKS = [1, 2, 3, 4, 6]


def random_shape(rng: random.Random, smallest: int = 1, largest: int = 5) -> list[int]:
    return [
        rng.choice([0, 1, 1, 2, 3, 4, 6, 9] if rng.random() < 0.1 else [1, 2, 3, 4, 6, 9])
        for _ in range(rng.randrange(smallest, largest + 1))
    ]


def regrouped(rng: random.Random, shape: list[int]) -> list[int]:
    """Another shape of as many elements: dimensions merged, split, and of one element inserted."""
    sizes = list(shape)
    for _ in range(rng.randrange(1, 4)):
        change = rng.choice(["merge", "split", "insert", "drop"])
        d = rng.randrange(len(sizes)) if sizes else 0
        if change == "merge" and d + 1 < len(sizes):
            sizes[d : d + 2] = [sizes[d] * sizes[d + 1]]
        elif change == "split" and sizes:
            divisors = [k for k in range(1, sizes[d] + 1) if sizes[d] % k == 0] or [1]
            k = rng.choice(divisors)
            sizes[d : d + 1] = [k, sizes[d] // k]
        elif change == "insert":
            sizes.insert(d, 1)
        elif change == "drop" and sizes and sizes[d] == 1:
            del sizes[d]
    return sizes if len(sizes) <= 5 else list(shape)


@pytest.mark.parallel(RANKS)
def test_random_reshapes_equal_serial() -> None:
    rng = random.Random(0)
    for _ in examples(50):
        shape = random_shape(rng)
        sizes = regrouped(rng, shape) if rng.random() < 0.8 else [-1]
        if 0 not in shape and sizes and rng.random() < 0.3:
            sizes[rng.randrange(len(sizes))] = -1
        grid = random_grid(rng)
        layout = random_layout(rng, grid, shape)
        function = (
            rng.choice(
                [
                    lambda x, s=sizes: x.reshape(s),
                    lambda x, s=sizes: x.view(*s),
                    lambda x, s=sizes: torch.reshape(x, tuple(s)),
                    lambda x, s=sizes: x.reshape(*s),
                ]
            )
            if sizes
            else lambda x: x.reshape(())
        )
        with noted(shape, sizes, layout, grid):
            agrees(function, [random_tensor(rng, shape)], [], grid, rng, [layout])


def random_rearrangement(rng: random.Random, x: Tensor) -> Any:
    n = x.dim()
    d, e = (rng.randrange(-n, n) for _ in range(2))
    order = rng.sample(range(n), n)
    ones = [i for i in range(n) if x.shape[i] == 1]
    grown = [
        rng.choice([1, 3, 5]) if i in ones else rng.choice([m, -1]) for i, m in enumerate(x.shape)
    ]
    low, high = sorted((d % n, e % n))
    return rng.choice(
        [
            lambda x: x.flatten(low, high),
            lambda x: torch.flatten(x, low),
            nn.Flatten(low, high),
            lambda x: x.unflatten(d, (1, -1) if x.shape[d] else (1, 0)),
            lambda x: x.squeeze(),
            lambda x: x.squeeze(d),
            lambda x: torch.squeeze(x, (low, high)) if low < high else x * 1,
            lambda x: x.unsqueeze(d),
            lambda x: torch.unsqueeze(x, n),
            lambda x: x.permute(order),
            lambda x: x.permute(*order),
            lambda x: torch.permute(x, tuple(order)),
            lambda x: x.transpose(d, e),
            lambda x: torch.swapaxes(x, d, e),
            lambda x: x.expand(2, *grown),
            lambda x: x.expand(grown),
            lambda x: x.transpose(d, e).reshape(-1),
            lambda x: x.unsqueeze(0).expand(3, *x.shape) * 2,
        ]
    )


@pytest.mark.parallel(RANKS)
def test_random_rearrangements_equal_serial() -> None:
    rng = random.Random(1)
    for n in examples(70):
        x = random_tensor(rng, random_shape(rng, 1, 4))
        function = random_rearrangement(rng, x)
        grid = random_grid(rng)
        layout = random_layout(rng, grid, x.shape)
        with noted(
            n,
            tuple(x.shape),
            function.__code__.co_consts if hasattr(function, "__code__") else function,
            layout,
            grid,
        ):
            agrees(function, [x], [], grid, rng, [layout])


def random_pick(rng: random.Random, size: int) -> Any:
    def bound() -> Any:
        return rng.choice([None, rng.randrange(-size - 1, size + 2)])

    if size and rng.random() < 0.3:
        return rng.randrange(-size, size)
    return slice(bound(), bound(), rng.choice([None, 1, 1, 2, 3, 7]))


@pytest.mark.parallel(RANKS)
def test_random_slices_equal_serial() -> None:
    rng = random.Random(2)
    for _ in examples(70):
        shape = random_shape(rng)
        index: list[Any] = [random_pick(rng, n) for n in shape]
        where = rng.randrange(len(index) + 1)
        if rng.random() < 0.4:
            index[where : where + rng.randrange(3)] = [...]
        if rng.random() < 0.3 and len(index) < 5:
            index.insert(rng.randrange(len(index) + 1), None)
        grid = random_grid(rng)
        layout = random_layout(rng, grid, shape)
        with noted(shape, index, layout, grid):
            if len(torch.empty(shape)[tuple(index)].shape) > 5:
                continue
            agrees(
                lambda x, i=tuple(index): x[i], [random_tensor(rng, shape)], [], grid, rng, [layout]
            )


def random_parting(rng: random.Random, x: Tensor) -> Any:
    d = rng.randrange(-x.dim(), x.dim())
    size = x.shape[d]
    start = rng.randrange(size + 1)
    length = rng.randrange(size - start + 1)
    step, parts = rng.randrange(1, size + 3), rng.randrange(1, size + 3)
    sections = []
    while sum(sections) < size:
        sections.append(rng.randrange(0, size - sum(sections) + 1))
    at = rng.randrange(-size, size) if size else None
    return rng.choice(
        [
            lambda x: x.narrow(d, start, length),
            lambda x: (
                torch.narrow(x, d, start - size, length) if start < size else x.narrow(d, 0, 0)
            ),
            lambda x: x.split(step, d),
            lambda x: torch.split(x, sections or [0], dim=d),
            lambda x: x.chunk(parts, d),
            lambda x: torch.chunk(x, parts, dim=d),
            lambda x: x.select(d, at) if at is not None else x * 1,
            lambda x: x.unbind(d) or x * 1,
            lambda x: [y * 2 for y in x] or x * 1,
        ]
    )


@pytest.mark.parallel(RANKS)
def test_random_partings_equal_serial() -> None:
    rng = random.Random(3)
    for n in examples(40):
        x = random_tensor(rng, random_shape(rng, 1, 4))
        function = random_parting(rng, x)
        grid = random_grid(rng)
        layout = random_layout(rng, grid, x.shape)
        with noted(n, tuple(x.shape), function.__code__.co_names, layout, grid):
            agrees(function, [x], [], grid, rng, [layout])


@pytest.mark.parallel(RANKS)
def test_random_joinings_equal_serial_with_plain_and_empty_pieces() -> None:
    rng = random.Random(4)
    for n in examples(40):
        shape = random_shape(rng, 1, 4)
        d = rng.randrange(-len(shape), len(shape))
        count, stacked = rng.randrange(1, 5), rng.random() < 0.3
        shapes = [list(shape) for _ in range(count)]
        for s in shapes:
            if not stacked:
                s[d] = rng.choice([0, 1, 2, 5, 8] if len(s) > 1 else [1, 2, 5, 8])
        cut = rng.randrange(1, count + 1)
        if not stacked and cut < count and rng.random() < 0.5:
            shapes[-1] = [0]  # torch skips it, whatever the other shapes
        tensors = [random_tensor(rng, s) for s in shapes]
        order = rng.sample(range(count), count)

        def function(*tensors: Tensor, d: int = d, order: Any = order, s: bool = stacked) -> Tensor:
            return (torch.stack if s else torch.cat)([tensors[i] for i in order], d)

        grid = random_grid(rng)
        layouts = [random_layout(rng, grid, s) for s in shapes[:cut]]
        with noted(n, shapes, d, order, cut, layouts, grid):
            agrees(function, tensors[:cut], tensors[cut:], grid, rng, layouts)


@pytest.mark.parallel(RANKS)
def test_pixel_shuffle_and_its_inverse_equal_serial_with_uneven_cuts() -> None:
    rng = random.Random(5)
    for _ in examples(30):
        r = rng.choice([1, 2, 3])
        lead = [rng.choice([1, 2, 3]) for _ in range(rng.choice([0, 1, 1, 2]))]
        plane = [rng.choice([1, 2, 3, 5]), rng.choice([1, 2, 4])]
        up = rng.random() < 0.5
        shape = [*lead, 2 * r * r, *plane] if up else [*lead, 2, *(r * n for n in plane)]
        grid = random_grid(rng)
        layout = random_layout(rng, grid, shape)
        module = (nn.PixelShuffle if up else nn.PixelUnshuffle)(r)
        with noted(shape, module, layout, grid):
            agrees(module, [random_tensor(rng, shape)], [], grid, rng, [layout])


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_random_padding_and_cropping_equals_serial(mode: str) -> None:
    rng = random.Random(6)
    done = 0
    while done < 25:
        spatial = rng.choice([1, 2, 3])
        shape = [rng.choice([1, 2, 3]) for _ in range(2)] + [
            rng.choice([1, 2, 3, 5, 8]) for _ in range(spatial)
        ]
        padded = rng.randrange(1, spatial + 3) if mode == "constant" else spatial
        amounts = [rng.choice([0, 0, 1, 2, 4, -1, -2]) for _ in range(2 * padded)]
        x = random_tensor(rng, shape)
        arguments: tuple[Any, ...] = (amounts, mode)
        if mode == "constant" and rng.random() < 0.5:
            arguments = (*arguments, 2.5)
        try:
            y = F.pad(x, *arguments)
            if mode == "circular":  # wrapped more than once, cropped planes hold arbitrary values
                F.pad(F.pad(x, [min(n, 0) for n in amounts]), [max(n, 0) for n in amounts], mode)
        except (RuntimeError, NotImplementedError):
            continue
        if not y.numel() and mode != "constant":
            continue  # the serial gradient of an empty result is arbitrary
        done += 1
        grid = random_grid(rng)
        layout = random_layout(rng, grid, shape)
        with noted(shape, arguments, layout, grid):
            agrees(lambda x, a=arguments: F.pad(x, *a), [x], [], grid, rng, [layout])


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize(
    "module",
    [
        nn.ZeroPad2d(2),
        nn.ConstantPad1d((1, 3), -2.0),
        nn.ReflectionPad2d((1, 2, 0, 3)),
        nn.ReflectionPad1d(2),
        nn.ReplicationPad3d(2),
        nn.ReplicationPad2d((0, 3, 0, 0)),
        nn.CircularPad2d((2, 0, 1, 0)),
        nn.CircularPad3d(1),
        nn.ReflectionPad3d((1, 1, 0, 0, 0, 0)),
    ],
    ids=str,
)
def test_padding_modules_equal_serial(module: nn.Module) -> None:
    rng = random.Random(7)
    n = int(type(module).__name__[-2])
    for _ in range(4):
        x = random_tensor(rng, (2, 2, *(rng.randrange(4, 8) for _ in range(n))))
        agrees(module, [x], [], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize(
    "function",
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
        lambda x: x.expand(3, 4),
        lambda x: x[4],
        lambda x: x[0, 0, 0, 0, 0],
        lambda x: x[::-1],
        lambda x: x[:, 3],
        lambda x: x[::0],
        lambda x: x.narrow(1, 2, 2),
        lambda x: x.narrow(1, 0, -1),
        lambda x: x.select(0, 2),
        lambda x: x.split(0),
        lambda x: x.split([1, 2]),
        lambda x: x.chunk(0),
        lambda x: x.unbind(4),
        lambda x: torch.cat([x, torch.ones(2, 3, 4, 6).double()]),
        lambda x: torch.cat([x, x[0]]),
        lambda x: torch.cat([x, x], 4),
        lambda x: torch.stack([x, torch.ones(2, 3, 4, 6)]),
        lambda x: torch.stack([x, x], 5),
        lambda x: F.pixel_shuffle(x, 2),
        lambda x: F.pixel_unshuffle(x, 2),
        lambda x: F.pixel_shuffle(x, 0),
        lambda x: F.pad(x, (1,)),
        lambda x: F.pad(x, (5, 0, 0, 0), "reflect"),
        lambda x: F.pad(x, (-6, 0)),
        lambda x: F.pad(x, (1, 1), "mirror"),
        lambda x: F.pad(x, (0, 0, 1, 1), "reflect", 1.0),
        lambda x: F.pad(x, (6, 0, 0, 0), "circular"),
    ],
)
def test_bad_arguments_are_refused_on_all_ranks(function: Any) -> None:
    rng = random.Random(8)
    x = random_tensor(rng, (2, 3, 4, 5))
    grid = random_grid(rng)
    for layout in (dc.Layout(), random_layout(rng, grid, x.shape)):
        raises_alike(function, [x], [], grid, rng, [layout])


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[True],
        lambda x: x.view(torch.int64),
        lambda x: torch.cat([x, x], out=torch.empty(1)),
        lambda x: x.as_strided((2, 2), (1, 1)),
    ],
)
def test_what_has_no_rule_is_refused_on_all_ranks(function: Any) -> None:
    rng = random.Random(9)
    refused(
        function,
        [random_tensor(rng, (4, 6))],
        [],
        random_grid(rng),
        rng,
        None,
        dc.UnsupportedOperation,
    )


@pytest.mark.parallel([1, 2, 3, 4])
def test_a_shape_changes_in_place_while_views_keep_theirs() -> None:
    rng = random.Random(31)
    for _ in examples(5):
        x = random_tensor(rng, (3, 1, 5))

        def function(x):
            y = x * 2
            before = y.flip(2)
            y.unsqueeze_(0).transpose_(1, 3)
            y.squeeze_(2)
            assert y.size() == y.shape == (1, 5, 3) and y.dim() == 3
            return y.mul_(3), before * x

        agrees(function, [x], [], random_grid(rng), rng)
        with torch.no_grad():
            agrees(lambda x: x.clone().t_(), [x[:, 0]], [], random_grid(rng), rng)
    for function in (
        lambda x: x.requires_grad_().unsqueeze_(0),
        lambda x: torch.no_grad()(torch.Tensor.unsqueeze_)(x.requires_grad_() * 2, 0),
    ):
        refused(function, [x], [], random_grid(rng), rng)


@pytest.mark.parallel([2, 3])
def test_what_is_cut_stays_so_beside_what_is_whole() -> None:
    grid = dc.ProcessGrid(height=-1)
    whole = dc.distribute_tensor(torch.rand(2, 5, 7, 4), grid, dc.Layout())
    cut = dc.distribute_tensor(torch.rand(2, 3, 7, 4), grid)
    dc.redistributions(reset=True)
    joined = torch.cat([whole, cut], 1)
    assert joined.cuts == cut.cuts
    assert not sum(entry.bytes for entry in dc.redistributions(reset=True))
