"""What is published says one version, one address and one set of requirements everywhere."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
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


DOCKER_WORDS = {"FROM", "RUN", "COPY", "ENV", "WORKDIR", "CMD"}
APPTAINER_SECTIONS = {"files", "post", "environment", "runscript"}


def extras_named(text: str) -> set[str]:
    """Return the extras with which a text installs the package."""
    found = re.findall(r"distconv\[([\w,]+)\]|'\.\[([\w,]+)\]'", text)
    return {extra for names in found for extra in "".join(names).split(",")}


def known_extras() -> set[str]:
    return set(METADATA.get_all("Provides-Extra") or ())


def test_the_docker_file_has_known_instructions_and_installs_extras_that_exist() -> None:
    text = (ROOT / "packaging/Dockerfile").read_text()
    lines = re.sub(r"\\\n", " ", text).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line.strip() and line[0] != "#"]
    assert {word for word, _ in steps} == DOCKER_WORDS
    assert steps[0][0] == "FROM"
    assert json.loads(dict(steps)["CMD"]) == ["python", "-m", "distconv", "--help"]
    assert extras_named(text) == {"mpi", "data"} <= known_extras()


def test_the_apptainer_file_has_a_header_and_known_sections() -> None:
    text = (ROOT / "packaging/distconv.def").read_text()
    header, *sections = re.split(r"^%", text, flags=re.MULTILINE)
    keys = dict(re.findall(r"^(\w+): (\S+)$", header, re.MULTILINE))
    docker = (ROOT / "packaging/Dockerfile").read_text()
    assert keys == {"Bootstrap": "docker", "From": re.findall(r"^FROM (\S+)$", docker, re.M)[0]}
    assert {section.split()[0] for section in sections} == APPTAINER_SECTIONS
    assert extras_named(text) == extras_named(docker)
    for section in sections:
        name, _, code = section.partition("\n")
        if name != "files":
            subprocess.run(["sh", "-n"], input=code, text=True, check=True)


def test_the_spack_recipe_requires_what_the_package_does() -> None:
    tree = ast.parse((ROOT / "packaging/spack/package.py").read_text())
    (recipe,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    # Spack finds py-distconv by this name.
    assert recipe.name == "PyDistconv"
    calls = [node.value for node in recipe.body if isinstance(node, ast.Expr)]
    specs = [
        ast.literal_eval(call.args[0])
        for call in calls
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "depends_on"
    ]
    required = [
        re.match(r"([\w-]+)(?:>=([\d.]+))?", text)
        for text in importlib.metadata.requires("distconv") or ()
        if "extra" not in text or re.search(r'extra == "(mpi|data)"', text)
    ]
    wanted = {
        f"py-{r[1]}" + (f"@{r[2].removesuffix('.0')}:" if r[2] else "")
        for r in required
        if r is not None
    }
    build = "py-setuptools@77:"
    python = f"python@{str(METADATA['Requires-Python']).removeprefix('>=')}:"
    assert set(specs) == wanted | {build, python}


def test_the_page_of_installing_names_extras_and_files_that_exist() -> None:
    text = (ROOT / "docs/install.md").read_text()
    assert {"mpi", "mpich", "openmpi"} <= extras_named(text) <= known_extras()
    files = set(re.findall(r"\b(?:packaging|recipe)/[\w./]+\w", text))
    assert files and all((ROOT / name).is_file() for name in files), files
    assert f"dist/distconv-{__version__}-py3-none-any.whl" in text


def test_llms_txt_links_to_pages_that_exist() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "llms.txt").read_text())
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).is_file()] == []
