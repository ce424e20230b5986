"""Pages for a browser, each in one file: headings, numbers, tables that sort, drawings.

Every page is well-formed XML as well, so that a test can take it apart. It is readable on a phone,
on dark screens and on paper, and loads nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape
from math import inf

from distconv.planning.table import Cell, filled, numeric, text_of
from distconv.tools.version import __version__

COLOURS = ("#4477aa", "#dd4f63", "#228833", "#b08c00", "#2a93b5", "#aa3377", "#d9662b", "#777f88")
"""Colours that all readers can tell apart, on light and dark ground (after Paul Tol)."""

_STYLE = """
:root { --ink: #1f2328; --quiet: #59636e; --ground: #ffffff; --card: #f6f8fa; --line: #d1d9e0;
  --bad: #b3261e; --good: #1a7f37; --bar: #c5d8ea; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #f0f3f6; --quiet: #a9b4bf; --ground: #0f1318;
  --card: #1a2028; --line: #3d444d; --bad: #ff8a80; --good: #56d364;
  --bar: #27496b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; color: var(--ink);
  background: var(--ground);
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .4rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
h3 { font-size: .95rem; margin: .8rem 0 .3rem; }
p { margin: .3rem 0 .8rem; max-width: 50rem; } .quiet, footer { color: var(--quiet); }
footer { margin-top: 2.5rem; font-size: .85rem; border-top: 1px solid var(--line);
  padding-top: .6rem; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem;
  margin: 1rem 0; }
.numbers div { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .5rem .8rem; }
.numbers b { display: block; font-size: 1.15rem; overflow-wrap: anywhere; }
.numbers span { color: var(--quiet); font-size: .85rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr));
  gap: 0 2rem; }
.charts > div, .nodes figure { break-inside: avoid; min-width: 0; }
.wide { overflow-x: auto; margin-top: .6rem; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: left;
  white-space: nowrap; vertical-align: top; }
td.long { white-space: normal; min-width: 16rem; }
td.number, th.number { text-align: right; }
td.number { background: linear-gradient(var(--bar), var(--bar)) no-repeat left / 0 100%;
  border-left: .5rem solid var(--ground); min-width: 6rem; }
thead th { position: sticky; top: 0; background: var(--ground); }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid #4477aa; }
th[aria-sort=ascending] button::after { content: ' \\2191'; }
th[aria-sort=descending] button::after { content: ' \\2193'; }
tr.marked td { color: var(--bad); font-weight: 600; }
.alert { border-left: 4px solid var(--bad); background: var(--card); padding: .5rem .8rem; }
.good { border-left-color: var(--good); }
.lane { display: grid; grid-template-columns: minmax(4.5rem, 9rem) 1fr; gap: .5rem;
  align-items: center; font-size: .82rem; line-height: 1.45; break-inside: avoid; }
.lane > :first-child { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
svg { display: block; width: 100%; } svg text { fill: var(--ink); font-size: 11px; }
svg .quiet { fill: var(--quiet); } svg .track { fill: var(--card); }
svg .axis { stroke: var(--line); stroke-width: 1; }
svg .curve { fill: none; stroke-width: 1.8; } svg .edge { stroke: var(--ground); stroke-width: .5; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .82rem; margin: .4rem 0;
  padding: 0; list-style: none; }
.legend svg { display: inline-block; width: .8rem; height: .8rem; vertical-align: -.1rem;
  margin-right: .35rem; }
.nodes { display: flex; flex-wrap: wrap; gap: .8rem; }
.nodes figure { margin: 0; padding: .4rem .5rem; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; }
.nodes figure div { display: grid; gap: 4px; }
.nodes span { color: #ffffff; font-size: 11px; font-weight: 600; line-height: 1.4;
  text-align: center; border-radius: 4px; padding: .15rem; }
.nodes figcaption { font-size: .8rem; color: var(--quiet); }
@media print { body { max-width: none; font-size: 11px; padding: 0; } .wide { overflow: visible; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } thead th { position: static; }
  th, td { white-space: normal; padding: .1rem .3rem; } td.number { white-space: nowrap; }
  h2 { break-after: avoid; } }
"""

# Without `less than` and `and` signs, which XML would have to escape.
_SCRIPT = """
for (const button of document.querySelectorAll('th button')) button.onclick = () => {
  const head = button.parentElement, table = head.closest('table'), body = table.tBodies[0];
  const place = head.cellIndex, up = head.getAttribute('aria-sort') !== 'ascending';
  for (const other of head.parentElement.cells) other.removeAttribute('aria-sort');
  head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
  const value = row => row.cells[place].dataset.value ?? row.cells[place].textContent;
  const order = (a, b) => value(a).localeCompare(value(b), undefined, {numeric: true});
  const number = row => row.cells[place].dataset.value === undefined ? NaN : Number(value(row));
  const compare = (a, b) => (number(a) - number(b)) || order(a, b);
  body.append(...[...body.rows].sort((a, b) => up ? compare(a, b) : compare(b, a)));
};
"""


_FOOTER = (
    f"distconv {__version__}. Click a heading to sort; hold the pointer over a drawing for more."
)


def page(
    title: str, about: str, numbers: Sequence[tuple[str, str]], sections: Sequence[str]
) -> str:
    """Return an HTML page: a sentence `about` it, numbers with labels, and sections of HTML."""
    cards = "".join(f"<div><b>{escape(n)}</b><span>{escape(w)}</span></div>" for n, w in numbers)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>"
        f'<h1>{escape(title)}</h1><p class="quiet">{escape(about)}</p>'
        f'<div class="numbers">{cards}</div>\n'
        + "\n".join(filter(None, sections))
        + f"\n<footer>{_FOOTER}</footer><script>{_SCRIPT}</script></body></html>\n"
    )


def section(title: str, body: str, note: str = "") -> str:
    """Return a section of a page: a heading, the sentence `note` on how to read it, and HTML."""
    said = f'<p class="quiet">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{said}{body}</section>"


def charts(parts: Mapping[str, str]) -> str:
    """Return drawings by their titles as HTML, side by side if there is room."""
    drawn = [f"<div><h3>{escape(title)}</h3>{body}</div>" for title, body in parts.items() if body]
    return f'<div class="charts">{"".join(drawn)}</div>'


def alert(text: str, good: bool = False) -> str:
    """Return a sentence in a conspicuous box, as HTML; green if `good`, else red."""
    return f'<p class="alert{" good" * good}">{escape(text)}</p>'


def sortable(rows: Sequence[Sequence[Cell]], marked: Collection[int] = ()) -> str:
    """Return rows, headings first, as an HTML table that a click on a heading sorts.

    Numbers beside the first column have bars, in proportion to the largest of their column. Columns
    that are empty but for their heading are left out. `marked` are the indices of highlighted rows,
    counted from 0 beneath the headings.
    """
    kept, numbers = filled(rows), numeric(rows)
    head = "".join(
        f'<th scope="col"{_NUMBER * (i in numbers)}><button type="button">'
        f"{escape(text_of(rows[0][i]))}</button></th>"
        for i in kept
    )
    largest = {i: max(map(_value, (row[i] for row in rows[1:]))) for i in numbers if i}
    body = "".join(
        f"<tr{_MARKED * (number in marked)}>"
        + "".join(_cell(row[i], i in numbers, largest.get(i, 0.0)) for i in kept)
        + "</tr>"
        for number, row in enumerate(rows[1:])
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


_NUMBER, _MARKED, _LONG = ' class="number"', ' class="marked"', ' class="long"'


def _value(cell: Cell) -> float:
    """Return the number of a cell, to sort by; -1 for a cell that is a text."""
    return -1 if isinstance(cell, str) else cell[1]


def _cell(cell: Cell, number: bool, largest: float) -> str:
    text, value = escape(text_of(cell)), _value(cell)
    if not number:
        return f"<td{_LONG * (len(text) > 60)}>{text}</td>"
    bar = 100 * value / largest if value > 0 and 0 < largest < inf else 0
    drawn = f' style="background-size:{bar:.3g}% 100%"' * (bar > 0)
    return f'<td{_NUMBER} data-value="{value!r}"{drawn}>{text}</td>'


def legend(colours: Mapping[str, str]) -> str:
    """Return the legend of a drawing as HTML: its colours, by the names that they stand for."""
    items = "".join(
        f'<li><svg viewBox="0 0 8 8" aria-hidden="true"><rect width="8" height="8" '
        f'fill="{colour}"/></svg>{escape(name)}</li>'
        for name, colour in colours.items()
    )
    return f'<ul class="legend">{items}</ul>'
