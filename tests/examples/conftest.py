"""What the tests of the examples share."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from tests.support.forks import blank


@pytest.fixture
def drawn() -> None:
    """Let the pictures of a test be drawn, each of which takes about a second."""


@pytest.fixture(autouse=True)
def blank_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave pictures blank but where a test asks for them to be `drawn`."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", blank)
