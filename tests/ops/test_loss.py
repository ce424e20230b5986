"""Losses on ranks without elements, narrow class numbers, refusals; see also the properties."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.support.serial import agrees, random_tensor


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


@pytest.mark.parallel([2])
def test_labels_of_a_volume_that_stay_whole_warn_of_the_layout_to_pass() -> None:
    with pytest.warns(UserWarning, match="without='channel'"):
        dc.distribute_tensor(torch.zeros(2, 4, 6, 5), dc.ProcessGrid(depth=2))


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("loss", [F.multi_margin_loss, F.multilabel_margin_loss])
def test_margins_of_one_sample_equal_serial_on_ranks_without_it(loss: Any, classes: int) -> None:
    rng = random.Random(0)
    grid, layout = dc.ProcessGrid(sample=-1), dc.Layout(sample="sample")
    scores = random_tensor(rng, (1, classes))
    of_several = loss is F.multilabel_margin_loss
    labels = torch.zeros((1, classes) if of_several else (1,), dtype=torch.int64)
    agrees(lambda x: loss(x, labels), [scores], [], grid, rng, [layout])
    agrees(lambda x, t: loss(x, t), [scores, labels], [], grid, rng, [layout, layout])
