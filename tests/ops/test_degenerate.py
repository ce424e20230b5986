"""Zeros, infinities, empty sequences and broadcast operands give what serial gives."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor

import distconv as dc
from tests.support.serial import agrees, raises_alike, random_grid, random_tensor

INF, NAN = float("inf"), float("nan")

ONE: dict[str, tuple[Callable, list]] = {
    "logsumexp of a masked block": (lambda x: x.logsumexp(0), [[2.0], [-INF], [3.0], [4.0]]),
    "std of equal elements": (lambda x: x.std(1), [[1.0, 1.0], [2.0, 2.0], [1.0, 3.0]]),
    "amax beside a nan": (lambda x: x.amax(1), [[1.0, 7.0, 2.0], [4.0, 4.0, 1.0]]),
    "amax of a nan": (lambda x: x.amax(1), [[1.0, NAN, 2.0], [4.0, 4.0, 1.0]]),
    "amin of nan": (lambda x: x.amin(0), [[NAN, 1.0], [NAN, 2.0], [3.0, 0.0]]),
    "max of all with nan": (lambda x: x.max(), [[NAN, 1.0], [NAN, 2.0], [3.0, 0.0]]),
    "largest norm of nan": (lambda x: x.norm(INF, 1), [[NAN, 1.0], [-5.0, 2.0], [3.0, 0.0]]),
    "sum of magnitudes beside a nan": (lambda x: x.norm(1), [[NAN], [1.0], [-2.0], [0.0]]),
    "length beside an infinity": (lambda x: x.norm(2, 0), [[INF], [1.0], [-2.0], [0.0]]),
    "cubic norm beside a nan": (lambda x: x.norm(3), [[NAN], [1.0], [0.0], [2.0]]),
    "norm of zeros": (lambda x: torch.linalg.vector_norm(x, 1.5), [[0.0], [0.0], [0.0]]),
    "norm of low order beside a zero": (lambda x: x.norm(0.5), [[0.0], [1.0], [-2.0], [4.0]]),
    "var of too few": (lambda x: x.var(0, correction=2), [[1.0, 5.0], [3.0, 5.0]]),
    "std of too few": (lambda x: x.std(0, correction=2), [[1.0, 5.0], [3.0, 5.0]]),
    "var beside an infinity": (lambda x: x.var(1), [[1.0, INF, 2.0], [4.0, 3.0, 1.0]]),
    "prod with an infinity": (lambda x: x.prod(1), [[2.0, 3.0, INF], [1.0, 2.0, 3.0]]),
    "prod with an infinity beside a number": (lambda x: x.prod(1), [[2.0, INF, 3.0, 4.0]]),
    "prod with a zero and an infinity": (lambda x: x.prod(0), [[0.0], [2.0], [INF], [3.0]]),
    "prod with a zero": (lambda x: x.prod(1), [[2.0, 0.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]]),
    "prod with two zeros": (lambda x: x.prod(1, True), [[2.0, 0.0, 0.0, 4.0]]),
    "prod of all with a zero": (lambda x: x.prod(), [[2.0, 0.0], [3.0, 4.0]]),
    "prod of all with two zeros": (lambda x: x.prod(), [[2.0, 0.0], [0.0, INF]]),
    "prod as another type": (lambda x: x.prod(1, dtype=torch.float32), [[2.0, 3.0], [1.0, 2.0]]),
    "sgn": (lambda x: x.roll(1, 0).sgn(), [[-2.0], [0.0], [3.0]]),
    "squeeze of no dimension": (lambda x: x.squeeze(()), [[1.0], [2.0], [3.0]]),
    "any over no dimension": (lambda x: torch.any(x, ()), [[1.0, 0.0], [0.0, 0.0]]),
    "normalize by the default norm": (lambda x: F.normalize(x, "fro"), [[3.0, 4.0], [0.0, 1.0]]),
}


NUMBER: dict[str, Callable] = {
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "cumsum": lambda x: x.cumsum(0),
    "cummax": lambda x: tuple(x.cummax(0)),
    "sort": lambda x: tuple(x.sort()),
    "topk": lambda x: tuple(x.topk(1)),
    "max": lambda x: tuple(x.max(0)),
    "min": lambda x: tuple(x.min(-1, keepdim=True)),
    "argmax": lambda x: x.argmax(0),
    "argmin": lambda x: x.argmin(-1, keepdim=True),
    "prod": lambda x: x.prod(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "transpose": lambda x: x.transpose(0, -1),
    "batch mean of a divergence": lambda x: F.kl_div(x, x.exp(), reduction="batchmean"),
}


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("name", NUMBER)
def test_a_tensor_without_dimensions_counts_as_a_vector(name: str) -> None:
    rng = random.Random(name)
    agrees(NUMBER[name], [random_tensor(rng, ())], [], random_grid(rng), rng)


@pytest.mark.parallel([2])
def test_the_rank_that_meets_it_raises() -> None:
    x = dc.distribute_tensor(torch.tensor([0.5, 2.0]), dc.ProcessGrid(sample=2))
    for function in (
        torch.bernoulli,
        lambda x: x.clone().bernoulli_(x),
        lambda x: F.gaussian_nll_loss(x, x, 1 - x, reduction="none"),
    ):
        raised = False
        try:
            function(x)
        except (RuntimeError, ValueError):
            raised = True
        assert MPI.COMM_WORLD.allgather(raised) == [False, True]


ACCEPTED: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "batch_norm of no samples": (lambda x: F.batch_norm(x, None, None, training=True), (0, 3, 4)),
    "batch_norm of no plane": (lambda x: F.batch_norm(x, None, None, training=True), (2, 3, 0)),
    "batch_norm without statistics": (lambda x: F.batch_norm(x, None, None), (0, 3, 4)),
    "batch_norm of nothing": (lambda x: F.batch_norm(x, x, x, training=True), (0,)),
    "instance_norm of no plane": (lambda x: F.instance_norm(x), (2, 3, 0)),
    "interpolation of no samples": (lambda x: F.interpolate(x, size=3), (0, 2, 4)),
    "split of nothing": (lambda x: x.split(0), (0, 3)),
    "flip by name": (lambda x: x.flip(dims=(0,)), (4, 3)),
    "permute by name": (lambda x: x.permute(dims=(1, 0)), (4, 3)),
    "reshape by name": (lambda x: torch.reshape(x, shape=(3, 4)), (4, 3)),
    "view by name": (lambda x: x.view(size=(2, 2, 3)), (4, 3)),
    "expand by name": (lambda x: x.expand(size=(2, 4, 3)), (4, 3)),
    "repeat by name": (lambda x: x.repeat(repeats=(2, 2)), (4, 3)),
    "tile by name": (lambda x: torch.tile(x, dims=(2,)), (4, 3)),
    "swapaxes by name": (lambda x: torch.swapaxes(x, axis0=0, axis1=1), (4, 3)),
    "mm by name": (lambda x: x.mm(mat2=x.t()), (4, 3)),
    "bmm by name": (lambda x: torch.bmm(x, mat2=x.mT), (2, 4, 3)),
    "mv by name": (lambda x: torch.mv(input=x, vec=x[0]), (4, 3)),
    "dot by name": (lambda x: torch.dot(x, tensor=x), (4,)),
    "outer by name": (lambda x: x.outer(vec2=x), (4,)),
    "addmm by name": (lambda x: torch.addmm(x, mat1=x, mat2=x), (3, 3)),
    "where by name": (lambda x: torch.where(condition=x > 0, input=x, other=-x), (4, 3)),
    "softmax of no integers": (lambda x: F.softmax(x.long(), 1), (0, 3)),
    "var of nothing": (lambda x: x.var(0), (0, 3)),
    "std of all of nothing": (lambda x: x.std(), (0, 3)),
    "var of nothings": (lambda x: x.var(1), (0, 3)),
    "var_mean over a tuple": (lambda x: torch.var_mean(x + 1000, (0, 2)), (4, 5, 6)),
    "std_mean that keeps": (lambda x: torch.std_mean(x + 1000, 1, keepdim=True), (4, 5, 6)),
    "var of old": (lambda x: (x + 1000).var(False), (4, 5, 6)),
    "var of old over a tuple": (lambda x: (x + 1000).var((1, 2), False), (4, 5, 6)),
    "adaptive average to nothing": (
        lambda x: F.adaptive_avg_pool2d(x.detach(), (0, 2)),
        (2, 3, 4, 5),
    ),
    "adaptive maximum to nothing": (lambda x: F.adaptive_max_pool1d(x.detach(), 0), (2, 3, 4)),
    "two ellipses": (lambda x: x[..., 1, ...], (2, 3, 4)),
    "two ellipses of nothing": (lambda x: x[..., 1, ..., 1], (3, 4)),
    "three ellipses": (lambda x: x[..., None, ..., ...], (3, 4)),
    "no classes": (lambda x: F.cross_entropy(x, x), (1, 0)),
    "out of None": (lambda x: torch.sum(x, 0, out=None), (4, 3)),
    "stable sort": (lambda x: tuple(x.sort(stable=True, descending=True)), (4, 3)),
    "stable argsort": (lambda x: torch.argsort(x, dim=0, stable=True), (4, 3)),
    "narrow from a number in a tensor": (lambda x: x.narrow(0, torch.tensor(1), 2), (4, 3)),
    "cat of nothing with something": (lambda x: torch.cat([x[:, 0][:0], x]), (4, 3)),
}


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_what_torch_accepts(name: str) -> None:
    function, shape = ACCEPTED[name]
    rng = random.Random(name)
    for _ in range(2):
        grid = random_grid(rng, ("channel", "height", "width"))
        agrees(function, [random_tensor(rng, shape)], [], grid, rng)


@pytest.mark.parallel([1, 2])
def test_an_empty_piece_of_a_concatenation_has_a_gradient() -> None:
    grid = dc.ProcessGrid(sample=-1)
    empty, x = (dc.distribute_tensor(torch.zeros(n), grid, dc.Layout()) for n in (0, 3))
    torch.cat([empty.requires_grad_(), x.requires_grad_()]).sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0,)


@pytest.mark.parallel([1, 2, 3])
def test_types_of_results_on_ranks_without_elements() -> None:
    rng = random.Random(0)
    x = torch.arange(12).reshape(1, 4, 3)
    grid = random_grid(rng, ["height"])
    agrees(lambda x: F.local_response_norm(x, 2), [x], [], grid, rng, [dc.Layout(sample="height")])
    z = torch.complex(random_tensor(rng, (4, 3)), random_tensor(rng, (4, 3)))
    agrees(lambda x: F.l1_loss(x, z), [z * 2], [], grid, rng)
    agrees(lambda x: x.logsumexp(1), [z], [], grid, rng)
    agrees(lambda x: x.prod(0, dtype=torch.bool), [x[0] > 4], [], grid, rng)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("name", ONE)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_degenerate_values(name: str) -> None:
    function, values = ONE[name]
    rng = random.Random(name)
    for _ in range(2):
        x = torch.tensor(values, dtype=torch.float64)
        agrees(function, [x], [], random_grid(rng), rng)


@pytest.mark.parallel([2, 4])
def test_an_infinity_does_not_spread_in_interpolation() -> None:
    grid = dc.ProcessGrid(width=-1)
    x = torch.tensor([[[1.0, INF, 2.0, 3.0]]], dtype=torch.float64)
    for size in (4, 8):
        expected = F.interpolate(x, size=size, mode="linear")
        actual = F.interpolate(dc.distribute_tensor(x, grid), size=size, mode="linear")
        torch.testing.assert_close(
            actual.full_tensor().nan_to_num(7, 8, 9), expected.nan_to_num(7, 8, 9)
        )


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("name", ["repeat", "tile"])
def test_repetition_in_new_dimensions_is_a_new_tensor(name: str) -> None:
    x = dc.distribute_tensor(torch.zeros(4, 3), dc.ProcessGrid(sample=-1))
    getattr(x, name)(1, 1, 1).add_(1)
    assert torch.equal(x.full_tensor(), torch.zeros(4, 3))


def _query(rows: int = 3, features: int = 4) -> torch.Tensor:
    return torch.ones(1, 2, rows, features, dtype=torch.float64)


WRONG: dict[str, Callable] = {
    "key features": lambda q: F.scaled_dot_product_attention(q, _query(5, 6), _query(5, 6)),
    "value rows": lambda q: F.scaled_dot_product_attention(q, _query(5), _query(6)),
    "key type": lambda q: F.scaled_dot_product_attention(q, _query().float(), _query().float()),
    "mask columns": lambda q: F.scaled_dot_product_attention(
        q, _query(5), _query(5), torch.ones(3, 6, dtype=torch.bool)
    ),
    "layer norm type": lambda q: F.layer_norm(q, (4,), torch.ones(4)),
    "group norm type": lambda q: F.group_norm(q, 1, torch.ones(2)),
    "softmax of integers": lambda q: F.softmax(q.long(), 3),
    "product of types": lambda q: q @ torch.ones(4, 4),
}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_an_error_on_ranks_without_elements_too(name: str) -> None:
    q = dc.distribute_tensor(_query(), dc.ProcessGrid(height=-1))
    raised = False
    try:
        WRONG[name](q)
    except RuntimeError:
        raised = True
    assert MPI.COMM_WORLD.allgather(raised) == [True] * MPI.COMM_WORLD.size


@pytest.mark.parallel([1, 2, 3])
def test_a_plain_tensor_takes_the_shape_of_a_distributed_one() -> None:
    x = dc.distribute_tensor(torch.zeros(4, 3), dc.ProcessGrid(sample=-1), dc.Layout())
    for name in ("view_as", "reshape_as"):
        y = getattr(torch.arange(12), name)(x)
        assert type(y) is torch.Tensor and torch.equal(y, torch.arange(12).reshape(4, 3))


@pytest.mark.gpu
@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("samples", [0, 1, 2, 3])
@pytest.mark.parametrize("padding", [(1, 0), (0, 1), (1, 1), (2, 0)])
def test_serial_torch_decides_about_transposed_convolutions_without_outputs(
    samples: int, padding: tuple[int, int]
) -> None:
    grid = dc.ProcessGrid(height=-1)
    x = torch.randn(samples, 2, 2, 2, dtype=torch.float64)
    parameters = [torch.randn(2, 3, 1, 1, dtype=torch.float64), torch.randn(3, dtype=torch.float64)]

    def transposed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv_transpose2d(x, weight, bias, padding=padding)

    given = [t.to(grid.device) for t in (x, *parameters)]
    try:
        made = transposed(*given)
    except RuntimeError:
        raises_alike(transposed, [x], parameters, grid, random.Random(0))
        return
    assert made.numel() == 0
    try:
        transposed(*(t.requires_grad_() for t in given)).sum().backward()
    except RuntimeError:  # cuDNN has no gradients of an output without elements
        assert transposed(dc.distribute_tensor(x, grid), *given[1:]).shape == made.shape
    else:
        agrees(transposed, [x], parameters, grid, random.Random(0))


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("samples, rows, columns", [(0, 3, 2), (2, 0, 0), (2, 3, 0), (1, 3, 2)])
def test_products_with_empty_orthogonal_matrices_equal_serial(
    samples: int, rows: int, columns: int
) -> None:
    rng, grid = random.Random(3), dc.ProcessGrid(sample=-1)
    shapes = (samples, rows, columns), (samples, columns), (samples, rows, 4)
    inputs = [random_tensor(rng, shape) for shape in shapes]
    agrees(torch.ormqr, inputs, [], grid, rng, [dc.Layout(sample="sample")] * 3)
