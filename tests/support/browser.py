"""Look at the reports as people do: `make reports`, in a minute, where there is a Chromium.

`build/reports` gets a page of each command, and pictures of it on a phone, on a wide screen, in the
dark, and on paper. In the browser every page fits the width of a phone, and its tables sort.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.fresh_environment import ROOT, run, without_foreign

FOLDER = ROOT / "build" / "reports"
MODULE = "examples.mesh_tangling.network:mesh_tangling_1k"
SHAPE = "--shape", "4,18,64,64"
MACHINE = "--machine", "h100"
PAGES: dict[str, tuple[int, tuple[str, ...]]] = {
    "explain": (0, ("explain", MODULE, *SHAPE, "--grid", "sample=2,height=4,width=2")),
    "verify": (2, ("verify", MODULE, *SHAPE, "--grid", "height=2", "--float64")),
    "predict": (0, ("predict", MODULE, *SHAPE, "--grid", "sample=4,height=4", *MACHINE)),
    "plan": (0, ("plan", MODULE, *SHAPE, "--ranks", "4", *MACHINE)),
    "too_large": (0, ("plan", MODULE, *SHAPE, "--ranks", "4", "--memory", "1MiB", *MACHINE)),
    "scale": (
        2,
        ("scale", "strong", MODULE, *SHAPE, "--ranks", "1,2", "--rounds", "3")
        + ("--predict-ranks", "4,8,16", *MACHINE, "--output", str(FOLDER / "study.json")),
    ),
    "timeline": (0, ("timeline", str(FOLDER / "trace.json"))),
}
"""The commands, each with its number of ranks, 0 for no launcher."""

LOOK = """
<script>
addEventListener('load', () => {
  document.documentElement.style.width = '390px';
  const faults = [];
  if (document.body.scrollWidth > 390) faults.push('is ' + document.body.scrollWidth + ' px wide');
  for (const table of document.querySelectorAll('table')) {
    const heads = [...table.tHead.rows[0].cells], rows = table.tBodies[0].rows;
    heads.forEach((head, place) => {
      if (!head.classList.contains('number')) return;
      const values = () => [...rows].map(row => Number(row.cells[place].dataset.value));
      head.firstChild.click();
      if (values().some((v, i, all) => i && all[i - 1] > v)) faults.push(head.textContent);
      head.firstChild.click();
      if (values().some((v, i, all) => i && all[i - 1] < v)) faults.push(head.textContent);
    });
  }
  document.body.dataset.faults = faults.join(', ') || 'none';
});
</script></body>"""
"""Clicks all headings of numbers twice, and writes what is wrong into the page."""


def chromium() -> str:
    """Return a browser; end the program where there is none."""
    names = "chromium", "chromium-browser", "google-chrome"
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        sys.exit("no Chromium on PATH: there is nothing to look with")
    return found


def look(browser: str, page: Path) -> str:
    """Take pictures of a page, and return what is wrong with it."""
    base = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]

    def call(*options: str) -> str:
        return subprocess.run(
            [*base, *options], check=True, capture_output=True, text=True, timeout=120
        ).stdout

    address, name = page.as_uri(), str(page.with_suffix(""))
    framed = page.with_suffix(".phone.html")
    # Chromium's own windows are 500 pixels wide at least.
    framed.write_text(f'<iframe src="{page.name}" width="390" height="1800"></iframe>')
    call(f"--screenshot={name}.phone.png", "--window-size=500,1830", framed.as_uri())
    call(f"--screenshot={name}.png", "--window-size=1200,1800", address)
    dark = "--blink-settings=preferredColorScheme=0"
    call(dark, f"--screenshot={name}.dark.png", "--window-size=1200,1800", address)
    call(f"--print-to-pdf={name}.pdf", "--no-pdf-header-footer", address)
    framed.write_text(page.read_text().replace("</body>", LOOK))
    said = re.search(r'data-faults="([^"]*)"', call("--dump-dom", framed.as_uri()))
    framed.unlink()
    return "its script did not run" if said is None else said[1]


def main() -> None:
    """Make all pages and look at them."""
    browser, python = chromium(), sys.executable
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    mpiexec = Path(python).with_name("mpiexec")
    run(mpiexec, "-n", "2", python, "-m", "examples.timeline", FOLDER / "trace.json", cwd=ROOT)
    wrong = 0
    for name, (ranks, words) in PAGES.items():
        page = FOLDER / f"{name}.html"
        launch = [str(mpiexec), "-n", str(ranks)] if ranks else []
        command = [*launch, python, "-m", "distconv", *words, "--html", str(page)]
        # A plan that fits nowhere ends with status 1, and has a page all the same.
        subprocess.run(command, cwd=ROOT, env=without_foreign(), capture_output=True, timeout=300)
        faults = look(browser, page) if page.exists() else "is not there"
        wrong += faults != "none"
        print(f"{page.relative_to(ROOT)}: {faults}", flush=True)
    if wrong:
        sys.exit(f"{wrong} pages have faults")


if __name__ == "__main__":
    main()
