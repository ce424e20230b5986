"""What README and docs show can be run, and prints what they say."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from distconv.tensor.dispatch import RULES
from tests.support.jobs import forked, mpiexec, own_environment
from tests.support.pages import ROOT, Program, Shell, agrees, pages, read, run

COMM = MPI.COMM_WORLD
READ = [read(page) for page in pages()]
PROGRAMS = [p for programs, _ in READ for p in programs if COMM.size in p.ranks]
SHELLS = [shell for _, shells in READ for shell in shells]


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_programs_print_what_the_page_says(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    rules, dtype = dict(RULES), torch.get_default_dtype()
    try:
        run(program, first=COMM.rank == 0)
    finally:
        RULES.clear()
        RULES.update(rules)
        torch.set_default_dtype(dtype)
        gc.collect()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shell", [s for s in SHELLS if s.shows_output], ids=str)
def test_commands_print_what_the_page_says(shell: Shell, tmp_path: Path) -> None:
    for name, code in shell.files.items():
        (tmp_path / name).write_text(code)
    script = tmp_path / "commands.py"
    script.write_text("import runpy; runpy.run_module('distconv', run_name='__main__')")
    for command, printed in re.findall(
        r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n?)*)", shell.text, re.MULTILINE
    ):
        words = shlex.split(command)
        at = words.index("python")
        assert words[at : at + 3] == ["python", "-m", "distconv"], "what else is run costs seconds"
        words[at : at + 3] = [sys.executable, "-S", "-E", *forked(script)]
        words = [mpiexec() if w == "mpiexec" else w for w in words]
        ran = subprocess.run(
            words,
            cwd=tmp_path,
            env=own_environment(PYTHONPATH=str(ROOT)),
            capture_output=True,
            text=True,
            timeout=200,
        )
        said = ran.stdout + ran.stderr
        assert agrees(printed, said) or agrees(printed, ran.stdout), f"{command} prints\n{said}"


def commands(text: str) -> list[list[str]]:
    """Return the words of each command of a block, without comments and prompts."""
    text = re.sub(r"\\\n", " ", text)
    lines = (line.removeprefix("$ ") for line in text.splitlines())
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """Return a cache of what `--help` of a command says."""
    return {}


@pytest.mark.parametrize("shell", [s for s in SHELLS if not s.shows_output], ids=str)
def test_commands_name_modules_targets_and_options_that_exist(
    shell: Shell, helps: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands(shell.text):
        if words[0] == "make":
            named = [w for w in words[1:] if "=" not in w and not w.startswith((".", "-"))]
            assert set(named) <= set(targets), words
        if "-m" not in words:
            continue
        module, *rest = words[words.index("-m") + 1 :]
        assert importlib.util.find_spec(module) is not None, f"{module} is not there"
        if module.partition(".")[0] not in ("distconv", "examples"):
            continue
        kinds = []
        while rest and re.fullmatch("[a-z]+", rest[0]) and module == "distconv" and len(kinds) < 2:
            kinds.append(rest.pop(0))
        kinds = kinds[: 2 if kinds[:1] == ["scale"] else 1]
        line = shlex.join([module, *kinds])
        if line not in helps:
            with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
                patch.setattr(sys, "argv", [module, *kinds, "--help"])
                patch.setenv("COLUMNS", "200")
                with pytest.raises(SystemExit) as ended:
                    runpy.run_module(module, run_name="__main__", alter_sys=True)
            assert not ended.value.code, line
            helps[line] = said.getvalue()
        until = rest.index("--") if "--" in rest else len(rest)
        for option in (w for w in rest[:until] if w.startswith("--")):
            known = re.search(rf"{option.partition('=')[0]}\b", helps[line])
            assert known, f"{shlex.join(words)}: no option {option}"


def test_pages_name_environment_variables_that_exist() -> None:
    sources = [*(ROOT / "distconv").rglob("*.py")]
    known = set(re.findall(r"DISTCONV_[A-Z_]+", "".join(p.read_text() for p in sources)))
    listed = ROOT / "docs/reference/environment.md"
    told = set(re.findall(r"DISTCONV_[A-Z_]+", "".join(p.read_text() for p in pages())))
    assert told <= known
    assert known <= set(re.findall(r"DISTCONV_[A-Z_]+", listed.read_text())), os.fspath(listed)
