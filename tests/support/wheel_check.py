"""Build what is published, and try it as a new user does: `make wheel-check`, in two minutes.

`dist/` gets the source distribution, and the wheel that is built from it. twine checks both. The
source distribution has all that git tracks. In a fresh environment with nothing but the wheel, the
program of README prints on two ranks what README says.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from distconv.tools.version import __version__
from tests.support.fresh_environment import ROOT, install, make, run
from tests.support.pages import agrees, read

RANKS = 2


def tracked() -> set[str]:
    """Return the files that git tracks, but for those whose names begin with a dot."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return {name for name in listed.stdout.splitlines() if not name.startswith(".")}


def build(folder: Path) -> tuple[Path, Path]:
    """Build both distributions into an empty `folder`, and return their paths."""
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", folder, cwd=ROOT)
    source, wheel = sorted(folder.iterdir(), key=lambda path: path.suffix)
    run(sys.executable, "-m", "twine", "check", "--strict", source, wheel, cwd=ROOT)
    return source, wheel


def check_contents(source: Path, wheel: Path) -> None:
    """Raise `SystemExit` where the source distribution lacks a file, or the wheel a module.

    The wheel has the modules of `distconv` and `layers`, and no others.
    """
    files = tracked()
    with tarfile.open(source) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    if missing := sorted(files - packed):
        sys.exit(f"{source.name} lacks {', '.join(missing)}: see MANIFEST.in")
    modules = {f"distconv/{n}" if n.startswith("layers/") else n for n in files}
    modules = {n for n in modules if n.startswith("distconv/")}
    with zipfile.ZipFile(wheel) as archive:
        installed = {n for n in archive.namelist() if ".dist-info/" not in n}
    if modules != installed:
        sys.exit(
            f"{wheel.name} differs from the sources in {', '.join(sorted(modules ^ installed))}"
        )


def check_quick_start(wheel: Path, folder: Path) -> None:
    """Install the wheel in a fresh environment in `folder`, and run the program of README there."""
    python = make(folder / "venv")
    install(python, f"distconv[mpich] @ {wheel.as_uri()}")
    program = read(ROOT / "README.md")[0][0].blocks[0]
    (folder / "train.py").write_text(program.code)
    printed = run(python.with_name("mpiexec"), "-n", str(RANKS), python, "train.py", cwd=folder)
    if not agrees(program.printed or "", printed):
        sys.exit(f"README says that it prints\n{program.printed}")
    version = run(python, "-m", "distconv", "--version", cwd=folder)
    if version != f"distconv {__version__}\n":
        sys.exit(f"the wheel is not of version {__version__}")


if __name__ == "__main__":
    source, wheel = build(ROOT / "dist")
    check_contents(source, wheel)
    with tempfile.TemporaryDirectory() as name:
        check_quick_start(wheel, Path(name))
    print(f"{source.name} and {wheel.name} are in order")
