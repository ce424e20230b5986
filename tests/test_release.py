"""What is published says one version, one address and one set of requirements everywhere."""

from __future__ import annotations

import importlib.metadata
import json
import re
from typing import Any

import pytest
import yaml

from distconv.tools.version import __version__
from tests.support.pages import ROOT

METADATA = importlib.metadata.metadata("distconv")
CITATION: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text())
RECIPE: dict[str, Any] = yaml.safe_load((ROOT / "recipe/recipe.yaml").read_text())
CONDA_NAMES = {"torch": "pytorch"}


def heading() -> tuple[str, str]:
    """Return version and day of the newest section of the changelog."""
    found = re.search(r"^## (\S+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert found is not None
    return found[1], found[2]


def addresses(text: str) -> set[str]:
    """Return the hosts that a text gives to the project's own pages."""
    keys = r"(?:home ?page|url|repository(?:-code)?|documentation|source|issues|changelog)"
    return set(re.findall(rf"^ *{keys} *[:=] *(https://[^/\s]+)", text, re.MULTILINE | re.I))


def test_one_version_stands_everywhere() -> None:
    said = {
        "installed": METADATA["Version"],
        "CITATION.cff": str(CITATION["version"]),
        "recipe": RECIPE["context"]["version"],
        "CHANGELOG.md": heading()[0],
    }
    assert said == dict.fromkeys(said, __version__)


def test_the_day_of_a_release_stands_in_changelog_and_citation() -> None:
    day = heading()[1]
    released = CITATION.get("date-released")
    assert (str(released) if released else "unreleased") == day
    assert day == "unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", day)


def test_one_address_stands_everywhere() -> None:
    files = "setup.cfg", "CITATION.cff", "recipe/recipe.yaml"
    said = {name: addresses((ROOT / name).read_text()) for name in files}
    assert len(set().union(*said.values())) == 1, said
    assert all(said.values()), said


def test_one_license_and_the_same_keywords_stand_everywhere() -> None:
    assert {METADATA["License-Expression"], CITATION["license"], RECIPE["about"]["license"]} == {
        "Apache-2.0"
    }
    assert METADATA["Keywords"].split(",") == CITATION["keywords"]


def test_the_recipe_requires_what_the_package_does() -> None:
    """Packages of conda bring no extras: mpi4py, an extra of pip, is always there."""
    required = [
        re.match(r"([\w-]+)([^;]*)(?:; extra == .mpi.)?$", text)
        for text in importlib.metadata.requires("distconv") or ()
    ]
    wanted = {CONDA_NAMES.get(r[1], r[1]): r[2].strip() for r in required if r is not None}
    python, *others = RECIPE["requirements"]["run"]
    assert {name: bound for name, _, bound in (o.partition(" ") for o in others)} == wanted
    assert python == "python >=${{ python_min }}"


@pytest.mark.parametrize("extra", ["mpi", "mpich", "openmpi"])
def test_every_extra_for_an_mpi_brings_mpi4py(extra: str) -> None:
    brought = [r for r in importlib.metadata.requires("distconv") or () if f'"{extra}"' in r]
    assert any(r.startswith("mpi4py") for r in brought)


def test_public_runners_run_targets_of_the_makefile() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = [s.get("run", "") for job in workflow["jobs"].values() for s in job["steps"]]
    made = {target for s in steps for target in re.findall(r"^make (\S+)", s)}
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert made <= set(targets)
    assert {"lint", "docs", "test"} <= made
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    pythons = set(matrix["python"]) | {case["python"] for case in matrix["include"]}
    torches = set(matrix["torch"]) | {case["torch"] for case in matrix["include"]}
    assert len(pythons) >= 3 and len(torches) >= 3
    classified = [c for c in METADATA.get_all("Classifier") or () if "Python :: 3." in c]
    assert pythons <= {c.rpartition(" ")[2] for c in classified}
    pinned = re.search(r"torch==(\S+)", (ROOT / "constraints.txt").read_text())
    assert pinned is not None and pinned[1] in torches


def test_the_version_is_written_in_one_module_only() -> None:
    written = json.dumps(__version__)
    files = [p for folder in ("distconv", "layers", "docs") for p in (ROOT / folder).rglob("*.py")]
    assert [p.name for p in files if written in p.read_text()] == ["version.py"]
