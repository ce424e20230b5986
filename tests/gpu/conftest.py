"""Fixtures of the tests that need a GPU, which several ranks may share; `make gpu` runs them."""

from __future__ import annotations

import pytest

import distconv as dc
from distconv.device.kinds import accelerator


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if accelerator() is None:
        pytest.skip("needs a GPU, and to be let see it: make gpu")


@pytest.fixture(params=["torch", "mpi", "nccl"])
def grid(request: pytest.FixtureRequest) -> dc.ProcessGrid:
    """Make a grid of all ranks along the height, with each transport that they can have."""
    try:
        return dc.ProcessGrid(height=-1, transport=request.param)
    except ValueError as error:
        pytest.skip(str(error))
