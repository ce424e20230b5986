"""Products of cut matrices and tensors equal the serial ones, contracted dimensions cut or not."""

from __future__ import annotations

import random
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.support.serial import agrees, deviation, random_grid, random_tensor

RANKS = [1, 2, 4]
ADDED = {
    "addmm": [(4, 3), (4, 5), (5, 3)],
    "addmv": [(4,), (4, 5), (5,)],
    "baddbmm": [(2, 4, 3), (2, 4, 5), (2, 5, 3)],
    "addbmm": [(4, 3), (2, 4, 5), (2, 5, 3)],
}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", ADDED)
def test_a_tensor_plus_a_product(name: str) -> None:
    rng, function = random.Random(name), getattr(torch, name)
    for beta, alpha in ((0.5, -2), (0, 1)):
        for start in (ADDED[name][0], ADDED[name][0][-1:], ()):
            x, a, b = (random_tensor(rng, s) for s in (start, *ADDED[name][1:]))
            if beta == 0:
                x = x * torch.nan

            def added(x, a, b, beta=beta, alpha=alpha):
                return function(x, a, b, beta=beta, alpha=alpha)

            cut = rng.randrange(1, 4)
            agrees(added, [x, a, b][:cut], [x, a, b][cut:], random_grid(rng), rng)
            agrees(lambda b, a, x: added(x, a, b), [b], [a, x], random_grid(rng), rng)


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize(
    "equation, shapes",
    [
        ("...ij,...jk->...ik", [(2, 3, 4, 5), (5, 2)]),
        ("...ij,...jk", [(3, 1, 4, 5), (2, 5, 2)]),
        ("b...,bc->c...", [(2, 3, 4), (2, 5)]),
        ("...a,a", [(4, 5), (5,)]),
        ("i...->...", [(4, 3, 2)]),
        ("...,...->", [(4, 3), (3,)]),
    ],
)
def test_einstein_sums_with_ellipses(equation: str, shapes: list) -> None:
    rng = random.Random(equation)
    for _ in range(4):
        tensors = [random_tensor(rng, s) for s in shapes]
        agrees(lambda *t: torch.einsum(equation, *t), tensors, [], random_grid(rng), rng)


@pytest.mark.parallel([2, 3])
def test_a_term_with_a_diagonal_is_cut_as_any_other() -> None:
    rng = random.Random(3)
    tensors = [random_tensor(rng, (4, 3, 5)), random_tensor(rng, (4, 5, 5))]
    layouts = [dc.Layout.of((("height",), (), ())), dc.Layout.of(((), ("height",), ()))]
    grid = dc.ProcessGrid(height=-1)
    agrees(lambda x, y: torch.einsum("bij,bjj->bi", x, y), tensors, [], grid, rng, layouts)


@pytest.mark.parallel([2])
def test_shapes_that_do_not_fit_are_an_error() -> None:
    x = dc.distribute_tensor(torch.ones(4, 5), dc.ProcessGrid(sample=-1))
    with pytest.raises(RuntimeError, match="4, 5"):
        x @ torch.ones(4, 3)
    with pytest.raises(RuntimeError):
        torch.einsum("...a,a->...", x, torch.ones(4))
    for shape in ((2, 4, 5), (1, 4, 5), (3, 5)):
        with pytest.raises(RuntimeError, match="broadcast"):
            torch.addmm(torch.ones(shape), x, torch.ones(5, 5))
    with pytest.raises(RuntimeError, match="does not broadcast to the product"):
        x.addmm_(torch.ones(1, 3), torch.ones(3, 5))
    booleans = dc.distribute_tensor(torch.ones(4) > 0, x.grid)
    with pytest.raises(dc.UnsupportedOperation, match=r"x\.int\(\)"):
        torch.addr(torch.ones(4, 4) > 0, booleans, booleans)


@pytest.mark.parallel([1, 2, 3])
def test_attention_broadcasts_leading_dimensions() -> None:
    rng = random.Random(4)
    for q, k, v in (((2, 3, 4, 4), (1, 3, 5, 4), (5, 6)), ((4, 4), (2, 5, 4), (2, 5, 6))):
        tensors = [random_tensor(rng, shape) for shape in (q, k, v)]
        agrees(F.scaled_dot_product_attention, tensors, [], random_grid(rng), rng)


@pytest.mark.parallel([3, 4])
def test_an_additive_mask_has_its_gradient_where_ranks_have_no_queries() -> None:
    rng = random.Random(11)
    grid = dc.ProcessGrid(height=-1)
    q, k, v = (random_tensor(rng, (2, n, 3)) for n in (2, 5, 5))
    cut, whole = dc.Layout(channel="height"), dc.Layout()
    for layout in (cut, dc.Layout(width="height"), whole):
        mask = random_tensor(rng, (2, 2, 5))
        agrees(
            F.scaled_dot_product_attention,
            [q, k, v, mask],
            [],
            grid,
            rng,
            [cut, whole, whole, layout],
        )


@pytest.mark.parallel([2, 4])
def test_dropout_of_attention_drops_weights_and_scales_the_others() -> None:
    rng = random.Random(13)
    q, k = random_tensor(rng, (2, 3, 6, 4)), random_tensor(rng, (2, 3, 7, 4))
    masks = {
        None: torch.zeros(6, 7).double(),
        (6, 7): random_tensor(rng, (6, 7)),
        (3, 6, 7): (random_tensor(rng, (3, 6, 7)) > 0) & (torch.arange(6) != 2).view(6, 1),
    }
    masks[(6, 7)][2] = -torch.inf
    eye = torch.eye(7, dtype=torch.float64).expand(2, 3, 7, 7)
    for axis in ("sample", "height", "width"):
        grid = dc.ProcessGrid(**{axis: -1})
        for mask in masks.values():
            expected = F.scaled_dot_product_attention(q, k, eye, mask)
            d, e, v = (dc.distribute_tensor(x, grid).requires_grad_() for x in (q, k, eye))
            torch.manual_seed(3)
            weights = F.scaled_dot_product_attention(d, e, v, mask, dropout_p=0.25)
            whole = weights.detach().full_tensor()
            kept = whole != 0
            assert deviation(whole, expected * kept / 0.75) < 1e-12
            assert 0.5 < kept[expected != 0].double().mean() < 0.95
            weights.sum().backward()
            assert all(x.grad.full_tensor().isfinite().all() for x in (d, e, v))
    torch.manual_seed(3)
    causal = F.scaled_dot_product_attention(d, e, v, None, 0.5, True).full_tensor()
    assert not causal.triu(1).any() and causal.tril().any()
    none = F.scaled_dot_product_attention(d, e, v, None, 1.0)
    assert not none.full_tensor().any()


SPARSE = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_sparse_matrices_by_distributed_ones(kind: str) -> None:
    rng = random.Random(8)
    dense = random_tensor(rng, (4, 5))
    s = SPARSE[kind](dense * (dense > 0.3))
    t = SPARSE[kind]((dense * (dense > 0.3)).t().contiguous())
    for columns in (1, 2, 6):
        grid = random_grid(rng)
        x = random_tensor(rng, (5, columns))
        for function in (
            lambda x: s @ x,
            lambda x: torch.sparse.mm(s, x),
            lambda x: torch.mm(s, x.sin()),
            lambda x: torch.matmul(x.t(), t),
            lambda x: s @ x[:, 0],
            lambda x: s.mv(x[:, -1]),
            lambda x: x[:, 0] @ t,
        ):
            agrees(function, [x], [], grid, rng)
        volume = random_tensor(rng, (5, columns, 2))
        agrees(lambda x: s @ x.flatten(1), [volume], [], grid, rng)


@pytest.mark.parallel([2, 4])
def test_batches_of_sparse_matrices_by_distributed_ones() -> None:
    rng = random.Random(12)
    for samples in (1, 3, 5):
        s = (random_tensor(rng, (samples, 4, 5)).relu()).to_sparse()
        x = random_tensor(rng, (samples, 5, 3))
        for function in (lambda x, s=s: torch.bmm(s, x), lambda x, s=s: s.bmm(x.sin())):
            agrees(function, [x], [], random_grid(rng), rng)


@pytest.mark.parallel([2])
def test_what_else_meets_sparse_matrices_is_refused_with_a_way_out() -> None:
    x = dc.distribute_tensor(torch.ones(5, 5), dc.ProcessGrid(height=-1))
    s = torch.eye(5).to_sparse()
    for function in (
        lambda: s.clone().requires_grad_() @ x,
        lambda: s @ x.expand(2, 5, 5),
        lambda: x * s,
        lambda: torch.bmm(x.expand(2, 5, 5), torch.stack([s, s])),
        lambda: torch.sparse.mm(s, x, "mean"),
    ):
        with pytest.raises(dc.UnsupportedOperation, match="x.to_dense|Leave it out"):
            function()
    layer = torch.nn.Linear(5, 5)
    layer.register_buffer("edges", s)
    with pytest.raises(ValueError, match="sparse: edges; keep such a matrix as a plain attribute"):
        dc.parallelize(layer, x.grid)


@pytest.mark.parallel([1, 2])
def test_packages_that_look_for_functions_beside_the_type_of_an_array_find_torch_s() -> None:
    """As opt_einsum does."""
    rng = random.Random(9)
    a, b = random_tensor(rng, (4, 5, 2)), random_tensor(rng, (2, 5, 3))

    def contract(x: Any, y: Any) -> Any:
        package: Any = import_module(type(x).__module__.partition(".")[0])
        if package is torch:
            return torch.einsum("abc,cbd->da", x, y) + torch.einsum("abc->a", x)
        found = package.transpose(package.tensordot(x, y, axes=((1, 2), (1, 0))), (1, 0))
        return found + package.einsum("abc->a", x)

    for _ in range(3):
        agrees(contract, [a, b], [], random_grid(rng), rng)
