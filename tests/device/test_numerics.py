"""Settings on which numbers depend are the same on all ranks, and doubtful sizes are named."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.device import kinds
from distconv.ops.conv import functions

RANK = dc.ProcessGrid(device="cpu", sample=-1).rank


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", ["benchmark", "deterministic", "allow_tf32"])
def test_ranks_whose_settings_differ_are_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = dc.ProcessGrid(height=-1, device="cpu")
    monkeypatch.setattr(torch.backends.cudnn, name, grid.rank == 1)
    with pytest.raises(ValueError, match=f"cudnn.{name} is False on rank 0 and True on rank 1"):
        dc.parallelize(nn.Conv2d(1, 1, 3), grid)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("value", ["1", "yes"])
def test_a_wish_for_channels_last_on_one_rank_is_an_error_on_all(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if RANK == 1:
        monkeypatch.setenv("DISTCONV_CHANNELS_LAST", value)
    told = {"1": "LAST is None on rank 0 and True on rank 1", "yes": "LAST='yes'.*rank 1"}
    with pytest.raises(ValueError, match=told[value]):
        dc.parallelize(nn.Conv2d(1, 1, 3), dc.ProcessGrid(height=-1, device="cpu"))


class ByOldNames:
    """Stands for a library's switches where a program has used the old name."""

    allow_tf32 = True


class ByNewNames:
    """Stands for a library's switches where a program has used the new name."""

    fp32_precision = "tf32"

    @property
    def allow_tf32(self) -> bool:
        raise RuntimeError("a mix of the legacy and new APIs")

    @property
    def conv(self) -> ByNewNames:
        return self


@pytest.mark.parametrize("kind", [ByOldNames, ByNewNames])
def test_float32_is_rounded_as_float32_where_it_is_verified(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends, "cudnn", kind())
    monkeypatch.setattr(torch.backends.cuda, "matmul", kind())

    def taken() -> list[bool]:
        return [
            kinds._takes_tf32(place) for place in (torch.backends.cudnn, torch.backends.cuda.matmul)
        ]

    assert taken() == [True, True]
    with pytest.raises(ZeroDivisionError), kinds.ieee_float32():
        assert taken() == [False, False]
        raise ZeroDivisionError
    assert taken() == [True, True]


def test_verify_leaves_the_settings_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Net(nn.Conv2d):
        def forward(self, x: Any) -> Any:
            seen.append(torch.backends.cudnn.allow_tf32)
            return super().forward(x)

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert dc.verify(Net(1, 1, 3), torch.randn(1, 1, 8, 8), {"height": 1}, show=False).ok
    assert set(seen) == {False} and torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("version", "elements", "doubtful"),
    [
        (None, 2**31, False),
        (None, 2**31 + 1, True),
        (91002, 16 * 124 * 1282 * 722, True),  # as reported
        (91002, 2**30, False),
        (91501, 16 * 124 * 1282 * 722, False),
    ],
)
def test_sizes_are_in_doubt_by_the_version_of_the_library(
    version: int | None, elements: int, doubtful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert kinds.in_doubt(elements) is doubtful


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("layer", [nn.Conv2d(2, 4, 3, padding=1), nn.ConvTranspose2d(2, 2, 2, 2)])
def test_a_large_block_of_halves_is_named_with_its_layer(
    layer: nn.Module, on_gpu: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 4 * 24 if isinstance(layer, nn.Conv2d) else 2 * 96
    monkeypatch.setattr(functions, "FEWEST_IN_DOUBT", 90)
    monkeypatch.setattr(functions, "in_doubt", lambda elements: elements > 90)
    monkeypatch.setattr(functions, "is_accelerator", lambda device: on_gpu)
    grid = dc.ProcessGrid(height=-1, device="cpu")
    model = dc.parallelize(nn.Sequential(nn.Identity(), layer).to(dtype), grid)
    x = dc.distribute_tensor(torch.ones(1, 2, 4 * grid.size, 6, dtype=dtype), grid)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x)
    messages = [str(w.message) for w in caught]
    if grid.rank or not on_gpu or dtype == torch.float32:
        assert messages == []
        return
    (message,) = messages
    assert f"in 1: this rank's block on {grid} has {made} elements in bfloat16" in message
    assert "Use smaller blocks" in message
