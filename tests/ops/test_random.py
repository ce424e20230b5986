"""Random numbers depend on the seed and on the position in the global tensor, not on the grid."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions

import distconv as dc
from tests.support.serial import deviation, raised_everywhere


@pytest.mark.parallel([1, 4])
def test_the_numbers_are_distributed_as_they_should_be() -> None:
    torch.manual_seed(0)
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.zeros(4, 8, 64, 64), grid)
    uniform, normal = torch.rand_like(x).full_tensor(), torch.randn_like(x).full_tensor()
    n = uniform.numel()
    assert abs(uniform.mean() - 0.5) < 4 * (1 / 12 / n) ** 0.5
    assert 0 <= uniform.min() < 1e-3 and 1 - 1e-3 < uniform.max() < 1
    assert abs(normal.mean()) < 4 / n**0.5 and abs(normal.var() - 1) < 4 * (2 / n) ** 0.5
    flat = normal.flatten()
    for lag in (1, 64, 64 * 64):
        assert abs((flat[lag:] * flat[:-lag]).mean()) < 4 / n**0.5
    assert len(torch.unique(torch.rand_like(x.double()).full_tensor())) == n


@pytest.mark.parallel([1, 4])
def test_dropout_scales_what_it_keeps_and_its_gradient() -> None:
    grid = dc.ProcessGrid(height=-1)
    x = dc.distribute_tensor(torch.ones(2, 4, 9, 8), grid).requires_grad_()
    y = torch.nn.Dropout(0.25)(x)
    y.sum().backward()
    kept = y.detach().full_tensor()
    assert kept.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert torch.equal(x.grad.full_tensor(), kept)
    assert torch.nn.Dropout(0.25).eval()(x) is x


@pytest.mark.parallel([1, 4])
@pytest.mark.parametrize(
    ("function", "ndim", "planes"),
    [
        (F.dropout1d, 2, 1),
        (F.dropout1d, 3, 2),
        (F.dropout2d, 3, 2),
        (F.dropout2d, 4, 2),
        (F.dropout3d, 4, 1),
        (F.dropout3d, 5, 2),
    ],
)
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_whole_planes_are_dropped_where_torch_drops_them(
    function: Callable[..., Tensor], ndim: int, planes: int
) -> None:
    ones = torch.ones(8, 6, *(4,) * (ndim - 2))
    x = dc.distribute_tensor(ones, dc.ProcessGrid(sample=-1))
    for dropped in (function(x, 0.5).full_tensor(), function(ones, 0.5)):
        each = dropped.reshape(*ones.shape[:planes], -1)
        assert set(each.unique().tolist()) == {0.0, 2.0} and not each.var(-1).any()
        assert each.flatten(0, -2).mean(-1).var() > 0


@pytest.mark.parallel([1, 2])
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_inputs_without_planes_are_refused_as_by_torch() -> None:
    grid = dc.ProcessGrid(sample=-1)
    for training in (True, False):
        with pytest.raises(RuntimeError, match="Expected 2D or 3D input"):
            F.dropout1d(dc.distribute_tensor(torch.ones(2, 4, 2, 2), grid), 0.5, training)
    with pytest.raises(RuntimeError, match="at least 2 dimensions"):
        F.dropout2d(dc.DistTensor.from_local(torch.ones(2), grid, dc.Layout()))


@pytest.mark.parallel([2])
def test_a_probability_out_of_range_is_an_error() -> None:
    x = dc.distribute_tensor(torch.ones(2, 4), dc.ProcessGrid(sample=2))
    with pytest.raises(ValueError, match="between 0 and 1, but got 1.5"):
        torch.nn.functional.dropout(x, 1.5)
    with pytest.raises(dc.UnsupportedOperation, match="generator"):
        x.clone().normal_(generator=torch.Generator())


@pytest.mark.parallel([1, 2, 4])
def test_counts_and_categories_are_distributed_as_they_should_be() -> None:
    torch.manual_seed(0)
    grid = dc.ProcessGrid(sample=-1)
    rates = torch.tensor([0.0, 0.3, 5.0, 1e3, 1e9]).expand(4000, 5)
    drawn = torch.poisson(dc.distribute_tensor(rates, grid, dc.Layout(sample="sample")))
    counts = drawn.full_tensor().double()
    spread = 5 * (rates[0] / 4000).sqrt()
    assert ((counts.mean(0) - rates[0]).abs() <= spread).all()
    assert ((counts.var(0) / rates[0].clamp_min(1e-9) - 1).abs()[1:] < 0.3).all()
    assert counts[:, 1].unique().tolist()[:3] == [0.0, 1.0, 2.0] and not counts[:, 0].any()
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0, 6.0]).expand(4000, 5)
    x = dc.distribute_tensor(weights, grid, dc.Layout(sample="sample"))
    for replacement, n in ((True, 1), (False, 1), (True, 7)):
        picked = torch.multinomial(x, n, replacement).full_tensor()
        shares = picked.flatten().bincount(minlength=5) / picked.numel()
        assert ((shares - weights[0] / 10).abs() < 5 * 0.5 / picked.numel() ** 0.5).all()
        assert not shares[0] and not shares[3]
    three = torch.multinomial(x, 3).full_tensor()
    assert (three.sort(1).values == torch.tensor([1, 2, 4])).all()
    assert abs((three[:, 0] == 4).double().mean() - 0.6) < 5 * 0.5 / 4000**0.5


@pytest.mark.parallel([1, 2])
def test_integers_of_all_types_have_the_range_of_torchs() -> None:
    grid = dc.ProcessGrid(height=-1)
    for dtype in (torch.bool, torch.int8, torch.int64, torch.float16, torch.float32, torch.float64):
        x = dc.distribute_tensor(torch.zeros(1, 1, 512, 256, dtype=dtype), grid)
        largest = 1 if dtype == torch.bool else x.random_().full_tensor().double().max()
        for bounds in ((), (1,), (0, 2)):
            torch.manual_seed(1)
            ours = x.random_(*bounds).full_tensor().double()
            torch.manual_seed(1)
            theirs = torch.zeros(1, 1, 512, 256, dtype=dtype).random_(*bounds).double()
            assert ours.min() >= theirs.min() - largest / 1000
            assert abs(ours.max() - theirs.max()) <= largest / 1000
            if bounds == (0, 2):
                assert set(ours.unique().tolist()) == {0.0, 1.0}
    numbers = dc.distribute_tensor(torch.zeros(64, 64).long(), grid).random_().full_tensor()
    assert abs((numbers % 2).double().mean() - 0.5) < 0.1


@pytest.mark.parallel([1, 2])
def test_parameters_out_of_range_raise_on_every_rank() -> None:
    rows = torch.ones(4, 3)
    rows[3] = 0
    cut = dc.Layout(sample="sample")
    grid = dc.ProcessGrid(sample=-1)
    x = dc.distribute_tensor(rows, grid, cut)
    for call, text in (
        (lambda: torch.multinomial(x, 1), "their sums positive"),
        (lambda: torch.multinomial(x, 4), "n_sample > prob_dist"),
        (lambda: torch.poisson(x - 0.5), "a rate is negative"),
        (lambda: torch.normal(x, x - 0.5), "std has negative elements"),
        (lambda: torch.normal(x, -1.0), "std"),
    ):
        assert text in raised_everywhere(RuntimeError, call)
    with pytest.raises(ValueError, match="satisfy the constraint"):
        distributions.Normal(x, x, validate_args=True)


def _distributions(x: Tensor) -> list[distributions.Distribution]:
    named = "Normal Laplace Cauchy Gumbel LogNormal Gamma Beta Weibull Pareto Kumaraswamy".split()
    single = "Poisson Exponential Chi2 HalfNormal HalfCauchy Dirichlet OneHotCategorical".split()
    single += ["Bernoulli", "Geometric", "Categorical", "ContinuousBernoulli"]
    return [
        *(getattr(distributions, name)(x, x + 0.1) for name in named),
        *(getattr(distributions, name)(x) for name in single),
        distributions.Uniform(x, x + 1),
        distributions.StudentT(x + 2, x, x),
        distributions.Binomial(4, x),
        distributions.NegativeBinomial(3, x),
        distributions.Independent(distributions.Normal(x, x), 2),
        distributions.MixtureSameFamily(
            distributions.Categorical(x), distributions.Normal(x, x + 1)
        ),
        distributions.RelaxedOneHotCategorical(torch.tensor(0.5).double(), x),
    ]


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("axis", ["height", "sample"])
def test_distributions_of_torch_have_the_serial_probabilities_and_gradients(axis: str) -> None:
    grid = dc.ProcessGrid(**{axis: -1})
    generator = torch.Generator().manual_seed(0)
    values = 0.1 + 0.8 * torch.rand(3, 2, 5, 4, generator=generator, dtype=torch.float64)
    x, serial = dc.distribute_tensor(values, grid).requires_grad_(), values.requires_grad_()
    for mine, theirs in zip(_distributions(x), _distributions(serial), strict=True):
        torch.manual_seed(0)
        drawn = mine.rsample((2,)) if mine.has_rsample else mine.sample((2,))
        whole = drawn.detach().full_tensor()
        results = (mine.log_prob(drawn.detach()), theirs.log_prob(whole))
        assert deviation(*results) < 1e-12, mine
        ours, wanted = (
            torch.autograd.grad(result.sum(), leaf, allow_unused=True)[0]
            for result, leaf in zip(results, (x, serial), strict=True)
        )
        assert deviation(ours, wanted) < 1e-10, mine
