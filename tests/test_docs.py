"""README and docs show code that runs and prints their output, in the field's words."""

from __future__ import annotations

import contextlib
import doctest
import gc
import importlib.util
import inspect
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv
from distconv.tensor.dispatch import RULES
from docs.conf import short_signature
from tests.support.jobs import forked, mpiexec, own_environment
from tests.support.pages import ROOT, Program, Shell, agrees, pages, read, run, write_files
from tests.support.public import examples, listed, shown
from tests.support.words import IN_MESSAGES, banned, texts

COMM = MPI.COMM_WORLD
READ = [read(page) for page in pages()]
PROGRAMS = [p for programs, _ in READ for p in programs if COMM.size in p.ranks]
USERS = [page for page in pages() if page.name != "CONTRIBUTING.md"]
SHELLS = [shell for _, shells in READ for shell in shells]


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_programs_print_what_the_page_says(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    if COMM.rank == 0:
        write_files(program)
    COMM.Barrier()
    files = [Path(block.file).stem for block in program.blocks if block.file]
    rules, dtype = dict(RULES), torch.get_default_dtype()
    try:
        run(program, first=COMM.rank == 0)
    finally:
        RULES.clear()
        RULES.update(rules)
        for name in files:
            sys.modules.pop(name, None)
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


@pytest.mark.parametrize("page", USERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_do_without_banned_words(page: Path) -> None:
    assert banned(page.read_text()) == []


def test_docstrings_of_the_api_do_without_banned_words() -> None:
    found = {name: banned(value.__doc__ or "") for name, value in listed()}
    assert {name: words for name, words in found.items() if words} == {}


def test_messages_do_without_banned_words() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}": words
        for folder in ("distconv", "layers")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in texts(path.read_text())
        if " " in text and (words := banned(text, IN_MESSAGES))
    }
    assert found == {}


def test_banned_words_are_found_in_messages_but_not_in_docstrings() -> None:
    program = '"""A cut."""\nraise ValueError(f"{cut} is no cut" f"; as {what} has to be, say")\n'
    found = [banned(text, IN_MESSAGES) for _, text in texts(program)]
    assert [[line.partition(";")[0] for line in lines] for lines in found] == [
        ["1: 'cut'", "1: 'is no'", "1: 'has to'", "1: 'say'"]
    ]


def test_banned_words_are_found_in_prose_only() -> None:
    code = "\n\n```python\ncut = 1\n```\n"
    page = f"A cut in `cut`, [link](cut.md).{code}What is cut off? So it\ngoes on.\n"
    assert [line.partition(";")[0] for line in banned(page)] == [
        "1: 'cut'",
        "6: 'cut'",
        "7: 'goes on'",
    ]


def test_signatures_of_the_api_show_neither_modules_nor_functions() -> None:
    shown = "(f: ~collections.abc.Callable[[str], object] = <function <lambda>>, c=<class 'a.b.C'>)"
    assert short_signature(None, "", "", None, None, shown, "~torch.Tensor") == (
        "(f: Callable[[str], object] = ..., c=C)",
        "Tensor",
    )


EXAMPLES = examples()


@pytest.mark.parallel([2])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples_of_docstrings_print_what_they_say(
    example: doctest.DocTest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examples are the same on both ranks, apart from blocks."""
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    rules = dict(RULES)
    example.globs = {"np": np, "torch": torch, "nn": torch.nn, "dc": distconv}
    printed = io.StringIO()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    try:
        failed, _ = doctest.DocTestRunner(optionflags=flags).run(example, out=printed.write)
    finally:
        RULES.clear()
        RULES.update(rules)
    assert not failed, printed.getvalue()


def without_example(names: Mapping[str, Any], examples: Sequence[doctest.DocTest]) -> list[str]:
    """Return the names without an example.

    Members and constants may occur in another example of their class or module, and so may the
    functions of Horovod, which come in families. Errors need no example.
    """
    own = {example.name for example in examples} | set(SHOWN_BY)
    seen: dict[str, set[str]] = defaultdict(set)
    for example in examples:
        parts = example.name.split(".")
        for count in range(1, len(parts) + 1):
            seen[".".join(parts[:count])] |= shown(example)
    missing = []
    for name, value in names.items():
        owner, _, last = name.rpartition(".")
        shared = not callable(value) or owner in names or owner == "distconv.horovod"
        error = isinstance(value, type) and issubclass(value, Exception)
        if not (error or name in own or (shared and last in seen[owner])):
            missing.append(name)
    return missing


SHOWN_BY = {
    "distconv.planning.LayoutPlan": "distconv.planning.plan_layouts",
    "distconv.training.History": "distconv.training.serve",
    "distconv.training.Loss": "distconv.training.serve",
    "distconv.training.Report": "distconv.training.serve",
    "distconv.training.TrainingLoss": "distconv.training.serve",
}
"""Results without an example of their own, with the names whose examples return them."""

BY_THE_LIBRARY = {"chunks", "facts", "first_values", "middle_row", "varies"}
"""Members of `Source` that programs do not call."""


def test_every_name_of_the_api_has_an_example() -> None:
    names = {n: value for n, value in listed() if n.rpartition(".")[2] not in BY_THE_LIBRARY}
    assert without_example(names, EXAMPLES) == []
    without_one = [example for example in EXAMPLES if example.name != "distconv.verify"]
    assert without_example(names, without_one) == ["distconv.verify"]
    assert set(SHOWN_BY.values()) <= {example.name for example in EXAMPLES}


def test_pages_of_the_api_list_every_public_name_and_nothing_internal() -> None:
    names = [name for name, _ in listed()]
    assert len(names) == len(set(names))
    public = {f"distconv.{name}" for name in distconv.__all__ if name != "data"}
    again = {"distconv.data.load_checkpoint", "distconv.data.save_checkpoint"}
    for package in ("data", "training", "planning", "horovod", "lbann"):
        module = importlib.import_module(f"distconv.{package}")
        for name, value in vars(module).items():
            if (
                not name.startswith("_")
                and not inspect.ismodule(value)
                and (getattr(value, "__module__", "").startswith("distconv"))
            ):
                public.add(f"distconv.{package}.{name}")
    assert public - set(names) == again
    assert not [name for name in names if re.search(r"\._|mark_summed|Base$", name)]
