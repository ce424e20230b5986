"""Losses equal serial ones: all reductions, weights, and targets in any layout."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distconv as dc
from tests.support.serial import agrees, examples, noted, raises_alike, random_grid, random_tensor

RANKS = [1, 2, 4]
REDUCTIONS = ["none", "mean", "sum"]


def compare(
    rng: random.Random, function: Callable[..., Any], tensors: list[Tensor], frozen: tuple[int, ...]
) -> None:
    """Compare a loss of some DistTensors, in their own layouts, and some plain tensors with serial.

    Tensors at the `frozen` positions take no gradient, which torch does not have for all.
    """
    grid = random_grid(rng)
    cut = [i for i in range(len(tensors)) if rng.random() < 0.6] or [rng.randrange(2)]
    plain = [i for i in range(len(tensors)) if i not in cut]

    def call(*operands: Tensor) -> Any:
        by_place = dict(zip([*cut, *plain], operands, strict=True))
        places = range(len(tensors))
        return function(*(by_place[i].detach() if i in frozen else by_place[i] for i in places))

    with noted([tuple(t.shape) for t in tensors], cut, grid):
        agrees(call, [tensors[i] for i in cut], [tensors[i] for i in plain], grid, rng)


def random_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice([1, 2, 3, 5, 7]) for _ in range(rng.randrange(1, 6)))


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize(
    "function, arguments, weighted",
    [
        (F.mse_loss, {}, True),
        (F.l1_loss, {}, True),
        (F.huber_loss, {"delta": 0.3}, True),
        (F.smooth_l1_loss, {"beta": 0.5}, False),
        (F.smooth_l1_loss, {"beta": 0.0}, False),
    ],
)
def test_regression_losses_equal_serial(function: Any, arguments: dict, weighted: bool) -> None:
    rng = random.Random(len(function.__name__))
    for _ in examples(12):
        shape = random_shape(rng)
        tensors = [random_tensor(rng, shape), random_tensor(rng, shape)]
        options = {**arguments, "reduction": rng.choice(REDUCTIONS)}
        if weighted and rng.random() < 0.5:
            tensors.append(random_tensor(rng, shape).abs())
        with noted(options):
            compare(
                rng,
                lambda x, y, w=None, o=options: function(
                    x, y, **o, **({} if w is None else {"weight": w})
                ),
                tensors,
                (),
            )


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("function", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_regression_losses_broadcast_as_in_serial(function: Any) -> None:
    rng = random.Random(1)
    for shapes in (((4, 3, 5), (3, 1)), ((1, 5), (4, 3, 5)), ((4, 1, 5), (1, 3, 1)), ((3,), ())):
        for reduction in REDUCTIONS:
            compare(
                rng,
                lambda x, y, r=reduction: function(x, y, reduction=r),
                [random_tensor(rng, shape) for shape in shapes],
                (),
            )


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("logits", [True, False])
def test_binary_cross_entropies_equal_serial_with_broadcast_weights(logits: bool) -> None:
    rng = random.Random(2)
    for _ in examples(24):
        shape = random_shape(rng)
        x, y = random_tensor(rng, shape), random_tensor(rng, shape).sigmoid()
        tensors = [x if logits else x.sigmoid(), y]
        names = [n for n in ("weight", "pos_weight")[: 1 + logits] if rng.random() < 0.6]
        for _ in names:
            kept = shape[rng.randrange(len(shape) + 1) :]
            tensors.append(random_tensor(rng, [rng.choice([n, n, 1]) for n in kept]).abs())
        options = {"reduction": rng.choice(REDUCTIONS)}
        function = F.binary_cross_entropy_with_logits if logits else F.binary_cross_entropy

        def call(
            x: Tensor,
            y: Tensor,
            *weights: Tensor,
            f: Any = function,
            n: Any = names,
            o: Any = options,
        ) -> Tensor:
            return f(x, y, **dict(zip(n, weights, strict=True)), **o)

        with noted(names, options):
            compare(rng, call, tensors, (2, 3))


@pytest.mark.parallel(RANKS)
@pytest.mark.parametrize("function", [F.cross_entropy, F.nll_loss])
def test_classification_by_class_index_equals_serial(function: Any) -> None:
    rng = random.Random(3)
    for _ in examples(24):
        classes = rng.choice([1, 3, 5])
        spatial = [rng.choice([1, 2, 4, 7]) for _ in range(rng.choice([0, 0, 1, 2, 3]))]
        shape = [rng.choice([1, 2, 5]), classes, *spatial]
        if rng.random() < 0.1:
            shape = [classes]
        x = random_tensor(rng, shape)
        sizes = shape[:1] + shape[2:] if len(shape) > 1 else []
        target = (random_tensor(rng, sizes).abs() * 1e6).long() % classes
        options: dict[str, Any] = {"reduction": rng.choice(REDUCTIONS)}
        if rng.random() < 0.5:
            options["ignore_index"] = rng.choice([-1, 0, classes])
            if rng.random() < 0.3:
                target = torch.where(random_tensor(rng, sizes) > 0, target, options["ignore_index"])
        if function is F.cross_entropy and rng.random() < 0.4:
            options["label_smoothing"] = 0.2
        tensors = [x, target]
        if rng.random() < 0.5:
            tensors.append(random_tensor(rng, [classes]).abs())
        with noted(options):
            compare(rng, lambda x, y, w=None, o=options: function(x, y, w, **o), tensors, (2,))


@pytest.mark.parallel(RANKS)
def test_cross_entropy_with_probabilities_equals_serial() -> None:
    rng = random.Random(4)
    for _ in examples(16):
        shape = [rng.choice([1, 2, 5]), rng.choice([2, 3]), *[4, 3, 2][: rng.randrange(4)]]
        tensors = [random_tensor(rng, shape), random_tensor(rng, shape).softmax(1)]
        if rng.random() < 0.5:
            tensors.append(random_tensor(rng, shape[1:2]).abs())
        options = {"reduction": rng.choice(REDUCTIONS), "label_smoothing": rng.choice([0.0, 0.1])}
        with noted(options):
            compare(
                rng, lambda x, y, w=None, o=options: F.cross_entropy(x, y, w, **o), tensors, (2,)
            )


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4), (2, 3, 5, 4), (2, 3, 3, 2, 4)], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_batch_of_which_everything_is_ignored_gives_what_serial_gives(
    shape: tuple[int, ...], smoothing: float, reduction: str
) -> None:
    rng = random.Random(5)
    target = torch.full((shape[0], *shape[2:]), -100)
    for weight in (None, torch.tensor([1.0, 2.0, 0.5]).double()):
        compare(
            rng,
            lambda x, y, w=weight: F.cross_entropy(
                x, y, w, label_smoothing=smoothing, reduction=reduction
            ),
            [random_tensor(rng, shape), target],
            (),
        )


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize(
    "function",
    [
        F.mse_loss,
        F.l1_loss,
        F.binary_cross_entropy_with_logits,
        lambda x, y: F.cross_entropy(x, (y[:, 0] > 0.5).long()),
        lambda x, y: F.cross_entropy(x, y),
    ],
)
@pytest.mark.parametrize("axis", ["sample", "channel", "height"])
def test_a_rank_without_elements_takes_part(function: Any, axis: str) -> None:
    rng = random.Random(6)
    grid = dc.ProcessGrid(channel=-1)
    layout = dc.Layout(**{axis: "channel"})
    x = [random_tensor(rng, (1, 3, 1, 4)), random_tensor(rng, (1, 3, 1, 4)).sigmoid()]
    agrees(lambda x, y: function(x, y.detach()), x, [], grid, rng, [layout, layout])


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(),
        nn.L1Loss(reduction="sum"),
        nn.SmoothL1Loss(beta=0.5),
        nn.HuberLoss(delta=0.5),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0]).double()),
        nn.CrossEntropyLoss(),
        lambda x, y: F.mse_loss(x, y, size_average=False),
        lambda x, y: F.l1_loss(x, y, reduce=False),
    ],
)
@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_loss_modules_and_their_older_arguments_equal_serial(loss: Any) -> None:
    rng = random.Random(7)
    for _ in range(3):
        compare(
            rng, loss, [random_tensor(rng, (3, 4, 5)), random_tensor(rng, (3, 4, 5)).sigmoid()], ()
        )


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.mse_loss(x, torch.ones(2, 2, 4, 1)),
        lambda x: F.mse_loss(x, x, reduction="average"),
        lambda x: F.mse_loss(x, x, weight=torch.ones(3)),
        lambda x: F.l1_loss(x, x, weight=torch.ones(3)),
        lambda x: F.smooth_l1_loss(x, x, beta=-1.0),
        lambda x: F.huber_loss(x, x, delta=0.0),
        lambda x: F.huber_loss(x, x, delta=-1.0, weight=torch.ones(2, 3, 4, 1)),
        lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones(1, 3, 4, 1).double()),
        lambda x: F.binary_cross_entropy_with_logits(x, x, weight=torch.ones(5)),
        lambda x: F.binary_cross_entropy_with_logits(x, x, pos_weight=torch.ones(5)),
        lambda x: F.cross_entropy(x, torch.zeros(2, 4, dtype=torch.int64)),
        lambda x: F.cross_entropy(x, torch.zeros(2, 4, 1)),
        lambda x: F.cross_entropy(x, torch.zeros(2, 3, 4, 1, dtype=torch.int64)),
        lambda x: F.cross_entropy(
            x, torch.zeros(2, 4, 1, dtype=torch.int64), torch.ones(4).double()
        ),
        lambda x: F.cross_entropy(x, torch.zeros(2, 4, 1, dtype=torch.int64), label_smoothing=1.5),
        lambda x: F.cross_entropy(x, torch.zeros(2, 4, 1, dtype=torch.int64), reduction="all"),
        lambda x: F.cross_entropy(x, x, ignore_index=0),
        lambda x: F.nll_loss(x, x),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_bad_arguments_are_refused_on_all_ranks(function: Any) -> None:
    rng = random.Random(8)
    grid = dc.ProcessGrid(width=-1)
    x = [random_tensor(rng, (2, 3, 4, 1))]
    for layout in (dc.Layout(), dc.Layout(width="width"), dc.Layout(channel="width")):
        raises_alike(function, x, [], grid, rng, [layout])


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignore_index", [-100, 2, 300])
def test_class_numbers_of_eight_bits(ignore_index: int, weighted: bool) -> None:
    rng = random.Random(9)
    grid, classes = dc.ProcessGrid(sample=-1), 200
    weight = random_tensor(rng, (classes,)).abs() if weighted else None
    # 156 is what -100 becomes in eight bits, and as many classes as samples look like a mask.
    for samples in (6, classes):
        x = random_tensor(rng, (samples, classes))
        labels = torch.tensor([156, *(rng.randrange(classes) for _ in range(samples - 1))]).byte()

        def loss(x: Any, labels: Any = labels) -> Any:
            return F.cross_entropy(x, labels, weight, ignore_index=ignore_index)

        agrees(loss, [x], [], grid, rng, [dc.Layout(sample="sample")])


@pytest.mark.parallel([1, 2, 3])
def test_class_numbers_of_planes_have_sixty_four_bits() -> None:
    rng, grid = random.Random(10), dc.ProcessGrid(width=-1)
    labels = torch.zeros(2, 4, 1, dtype=torch.uint8)
    x = [random_tensor(rng, (2, 3, 4, 1))]
    raises_alike(lambda x: F.cross_entropy(x, labels), x, [], grid, rng, [dc.Layout(width="width")])


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum", "batchmean"])
def test_divergence_of_log_probabilities(reduction: str) -> None:
    rng = random.Random(reduction)
    for log_target in (False, True):
        x, y = random_tensor(rng, (3, 5, 4)), random_tensor(rng, (3, 5, 4))

        def function(x, y, log_target=log_target):
            target = y if log_target else y.softmax(1)
            return F.kl_div(x, target, reduction=reduction, log_target=log_target)

        agrees(function, [x, y], [], random_grid(rng), rng)
        agrees(function, [x], [y], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_gaussian_likelihood(reduction: str) -> None:
    rng = random.Random(reduction)
    for shape in ((4, 3, 5), (4, 3), (4, 3, 1)):
        x, y = random_tensor(rng, (4, 3, 5)), random_tensor(rng, (4, 3, 5))
        var = random_tensor(rng, shape).abs()

        def function(x, y, var):
            return F.gaussian_nll_loss(x, y, var, full=True, eps=0.1, reduction=reduction)

        agrees(function, [x, y, var], [], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cosine_similarity(dim: int) -> None:
    rng = random.Random(dim)
    x, y = random_tensor(rng, (4, 3, 5)), random_tensor(rng, (4, 3, 5))
    agrees(lambda x, y: F.cosine_similarity(x, y, dim), [x, y], [], random_grid(rng), rng)


@pytest.mark.parallel([1, 2, 4])
def test_a_dice_loss_written_with_sums() -> None:
    rng = random.Random(8)
    x, y = random_tensor(rng, (2, 3, 7, 5)), random_tensor(rng, (2, 3, 7, 5)).abs()

    def dice(x, y):
        p = x.softmax(1)
        over = (0, 2, 3)
        return (1 - 2 * (p * y).sum(over) / ((p + y).sum(over) + 1e-5)).mean()

    agrees(dice, [x, y], [], random_grid(rng), rng)


@pytest.mark.parallel([4])
def test_labels_of_a_volume_laid_out_like_it_are_not_moved_and_others_with_a_word() -> None:
    grid = dc.ProcessGrid(depth=2, height=2)
    scores = dc.distribute_tensor(torch.randn(2, 3, 4, 6, 5), grid)
    labels = torch.randint(3, (2, 4, 6, 5))
    alike = dc.distribute_tensor(labels, grid, dc.Layout.like(scores, without="channel"))
    by_position = dc.distribute_tensor(labels, grid)
    expected = F.cross_entropy(scores.full_tensor(), labels)
    dc.redistributions(reset=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(F.cross_entropy(scores, alike).full_tensor(), expected)
    assert dc.redistributions() == []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.testing.assert_close(F.cross_entropy(scores, by_position).full_tensor(), expected)
    words = [str(each.message) for each in said]
    assert len(words) == (grid.rank == 0)
    assert all("test_loss.py" in text and "without='channel'" in text for text in words)
