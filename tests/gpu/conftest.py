"""These tests need a GPU, which several ranks may share; `make gpu` runs them."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from distconv.transport import nccl


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, and to be let see it: make gpu")


@pytest.fixture(params=["mpi", "nccl"])
def grid(request: pytest.FixtureRequest) -> dc.ProcessGrid:
    """All ranks along the height, with each transport that they can have."""
    automatic = dc.ProcessGrid(height=-1)
    if request.param == automatic.transport.name:
        return automatic
    if request.param == "nccl":
        pytest.skip(f"nccl: {nccl.why_unavailable() or 'ranks share a GPU'}")
    return dc.ProcessGrid(height=-1, transport=request.param)
