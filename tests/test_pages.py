"""The numbers, pictures and opening words of pages are those of the results that they cite."""

from __future__ import annotations

import re
from statistics import median

from tests.support.pages import ROOT
from tests.support.words import texts

README = ROOT / "README.md"


def test_readme_is_short_and_opens_with_the_terms_of_the_field() -> None:
    text = README.read_text()
    assert text.count("\n") < 130
    for page in (README, ROOT / "docs/index.md"):
        opening = " ".join(page.read_text()[:1500].lower().split())
        for term in ("spatial, domain and context parallelism", "domain decomposition", "halo"):
            assert term in opening, (page, term)
        assert re.search(r"^\*\*Status\.\*\*", page.read_text(), re.MULTILINE)


def counts(heading: str) -> tuple[int, int, int, int]:
    """Return the numbers of cases, packages, right and unsupported cases of a table."""
    text = (ROOT / "docs/reference/networks.md").read_text().partition(f"## {heading}\n")[2]
    cases, packages, rest = re.findall(r"(\d+) of (\d+) packages: ([^.]*)\.", text)[0]
    each = {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", rest)}
    assert set(each) <= {"right", "unsupported"}
    return int(cases), int(packages), each["right"], each.get("unsupported", 0)


def rows(package: str) -> list[list[str]]:
    """Return the results of a package's losses and metrics on networks.md, for each case."""
    text = (ROOT / "docs/reference/networks.md").read_text().partition("## Losses")[2]
    found = (line.split(" | ") for line in text.splitlines() if line.startswith(f"| {package} |"))
    return [cells[3:5] for cells in found]


def test_readme_counts_the_networks_and_losses_of_their_page() -> None:
    networks, _, right, _ = counts("Networks")
    losses, _, agree, unsupported = counts("Losses and metrics")
    assert f"{right} of {networks} networks and {agree} of {losses} losses" in README.read_text()
    assert f"the other {networks - right + unsupported} raise" in README.read_text()


def test_the_page_of_other_packages_counts_those_of_networks() -> None:
    text = (ROOT / "docs/howto/other_packages.md").read_text()
    monai, metrics = rows("monai"), rows("torchmetrics")
    right = monai.count(["right", "right"])
    assert (
        f"of {len(monai)} losses and metrics {right} right and {len(monai) - right} unsup" in text
    )
    assert f"{metrics.count(['right', 'right'])} of {len(metrics)} metrics right" in text
    tables = (ROOT / "docs/reference/networks.md").read_text().partition("## Losses")[0]
    assert tables.count("\n| monai |") == int(re.findall(r"of (\d+) networks right", text)[0])


def test_readme_counts_the_functions_of_their_page() -> None:
    text = (ROOT / "docs/reference/coverage.md").read_text()
    table = re.findall(r"^\| torch\S* \| (\d+) \| (\d+) \| (\d+) \| \d+ \|$", text, re.MULTILINE)
    sums = [sum(map(int, column)) for column in zip(*table, strict=True)]
    exact, moved, unsupported = (f"{float(f'{count:.2g}'):,.0f}" for count in sums)
    assert f"about [{exact} keep the layout" in README.read_text()
    assert f"{moved} redistribute it first, {unsupported} raise an error" in README.read_text()


def test_readme_states_the_times_of_cpu_md() -> None:
    text = (ROOT / "benchmarks/results/cpu.md").read_text().partition("\n## step\n")[2]
    ratios = [
        float(found[1])
        for line in text.partition("\n## ")[0].splitlines()
        if re.search(r"  over the best plain torch on the block", line)
        and (found := re.search(r"m?s +[\d.]+ m?s +([\d.]+)", line))
    ]
    expected = (
        f"{len(ratios)} networks on two ranks takes [{min(ratios):.2f} to {max(ratios):.2f} times"
    )
    assert expected in README.read_text()
    assert f"{median(ratios):.2f} in the median" in README.read_text()


def test_readme_states_the_memory_of_its_page() -> None:
    text = (ROOT / "docs/reference/performance.md").read_text().partition("## Memory")[2]
    peaks = re.findall(r"\| (\d\.\d\d) \|$", text.partition("\n## ")[0], re.MULTILINE)
    assert len(peaks) == 4
    assert f"[{min(peaks)} to {max(peaks)} times half]" in README.read_text()


def test_pages_state_the_errors_of_predictions() -> None:
    text = (ROOT / "benchmarks/results/predictions.md").read_text()
    for kind in ("time", "memory"):
        numbers = re.search(rf"^{kind} +([\d.]+)% +([\d.]+)% +([\d.]+)% +([\d.]+)%", text, re.M)
        assert numbers is not None
        line = f"| {kind} | {numbers[2]}% | {numbers[3]}% | {numbers[4]}% |"
        assert line in (ROOT / "docs/reference/performance.md").read_text()
        assert f"{numbers[2]}% for the {kind}" in README.read_text()


def test_the_gallery_shows_every_picture_of_the_site() -> None:
    gallery = ROOT / "docs/examples/gallery.md"
    shown = {
        (gallery.parent / name).resolve()
        for name in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", gallery.read_text())
    }
    assert all(path.is_file() for path in shown)
    assert {path.resolve() for path in (ROOT / "docs").rglob("*.png")} <= shown


OF_TORCH = "Default process group has not been initialized"
"""A message of torch itself on the page of troubleshooting."""


def test_troubleshooting_quotes_messages_that_exist() -> None:
    messages = "\n".join(
        text
        for path in sorted((ROOT / "distconv").rglob("*.py"))
        for _, text in texts(path.read_text())
    )
    page = (ROOT / "docs/howto/troubleshooting.md").read_text()
    quotes = [
        re.sub(r"^\w+Error: ", "", quote)
        for seen in re.findall(r"^\| ([^|]*) \|", page, re.MULTILINE)
        for quote in re.findall(r"`([^`]*)`", seen)
        if OF_TORCH not in quote
    ]
    # Words between values: a number, a name, a setting or an ellipsis.
    words = [re.split(r"\s*(?:\.\.\.|[^\s:,]*[\d=][^\s,]*|\()[,:]?\s*", quote) for quote in quotes]
    phrases = [phrase for split in words for phrase in split if phrase.count(" ") > 1]
    assert len(phrases) > 30
    # A message may be put together from two texts.
    assert [phrase for phrase in phrases if not in_two_parts(phrase.split(), messages)] == []


def in_two_parts(words: list[str], text: str) -> bool:
    """Return whether a text has the first of the words in a row, and the others in a row."""
    return any(
        " ".join(words[:n]) in text and " ".join(words[n:]) in text for n in range(len(words))
    )
