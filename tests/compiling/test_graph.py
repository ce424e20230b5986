"""Programs that compilers of torch.compile take have the numbers of those traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.ops.conv import local_convolution
from tests.compiling.test_compile import CALLS, LOSSES, check, of_volumes, plain, trained, volume
from tests.support.serial import deviation


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", ["plain", "of_halves"])
def test_a_graph_of_the_same_calls_has_the_same_bits(name: str) -> None:
    assert check(LOSSES[name], backend="eager").replays == CALLS - 2


def few_layers() -> nn.Module:
    """Return a network that is compiled in seconds."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.SiLU(),
        nn.Dropout(0.3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


def in_double(model: nn.Module) -> Callable[..., Any]:
    """Return a loss in double precision."""
    loss = plain(model.double())
    return lambda x, y: loss(x.double(), y)


@pytest.mark.parallel(2)
def test_compilers_compute_the_same_to_rounding(capsys: pytest.CaptureFixture[str]) -> None:
    grid = dc.ProcessGrid(height=2)
    expected, _ = trained(in_double, False, grid, few_layers)
    actual, step = trained(in_double, True, grid, few_layers, "inductor")
    assert step.replays == CALLS - 2
    assert ("inductor compiles" in capsys.readouterr().err) == (grid.rank == 0)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == theirs.dtype
        if mine.dtype == torch.float64:
            assert deviation(mine, theirs) < 1e-9
        else:
            assert torch.equal(mine, theirs)


@pytest.mark.parallel(2)
def test_layouts_of_onednn_stay_out_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_convolution, "_FEWEST_PRODUCTS", 0)
    local_convolution._pays.cache_clear()
    grid = dc.ProcessGrid(depth=2)
    expected, _ = trained(of_volumes, False, grid, volume)
    actual, step = trained(of_volumes, True, grid, volume, "aot_eager")
    local_convolution._pays.cache_clear()
    assert "mkldnn" in step.source
    for mine, theirs in zip(actual, expected, strict=True):
        assert deviation(mine, theirs) < 1e-4


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("what", [nn.ReLU(), lambda x: x])
def test_an_unknown_backend_is_an_error_that_names_it(what: Any) -> None:
    with pytest.raises(ValueError, match="backend='nonesuch' is unknown.*'inductor'"):
        dc.compile(what, backend="nonesuch")
