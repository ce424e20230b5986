"""Drawings in SVG that are readable on light and dark pages, on screens and in print."""

# ruff: noqa: E501 - words of figures stand on lines of their own

from __future__ import annotations

from html import escape
from pathlib import Path

RANKS = ("#4477aa", "#dd4f63", "#228833", "#b08c00", "#2a93b5", "#aa3377", "#d9662b", "#777f88")
"""A colour for each rank, which people who are blind to some colours tell apart (Paul Tol)."""

_STYLE = """
  text { font: 13px system-ui, 'Helvetica Neue', Arial, sans-serif; fill: #1f2328 }
  .small { font-size: 11.5px } .title { font-size: 15px; font-weight: 600 } .mono { font-family: monospace }
  .on { fill: #ffffff; font-weight: 600 } .quiet { fill: #59636e }
  .card { fill: #ffffff; stroke: #d1d9e0 } .line { stroke: #59636e; fill: none; stroke-width: 1.3 }
  .frame { stroke: #1f2328; fill: none; stroke-width: 2 } .cell { stroke: #ffffff; stroke-width: 0.8 }
  .padding { fill: #eaeef2; stroke: #ffffff; stroke-width: 0.8 } .box { fill: #f6f8fa; stroke: #d1d9e0 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f3f6 } .quiet { fill: #a9b4bf } .on { fill: #ffffff }
    .card { fill: #15191f; stroke: #3d444d } .line { stroke: #a9b4bf } .frame { stroke: #f0f3f6 }
    .cell { stroke: #15191f } .padding { fill: #2a313a; stroke: #15191f } .box { fill: #212830; stroke: #3d444d }
  }
"""


class Canvas:
    """A drawing of a width and a height, with a title for those who cannot see it."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path class="tip" d="M0 0L8 4L0 8z" fill="#808b96"/>'
            "</marker></defs>",
            f'<rect class="card" x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>',
        ]

    def text(
        self, x: float, y: float, words: str, kind: str = "", anchor: str = "start", on: str = ""
    ) -> None:
        """Write words with their baseline at (x, y); on lines, which the colour `on` covers."""
        cover = f' style="paint-order: stroke; stroke: {on}; stroke-width: 8px"' if on else ""
        self._parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}"{cover}>'
            f"{escape(words)}</text>"
        )

    def rect(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        kind: str = "cell",
        fill: str = "",
        **more: str,
    ) -> None:
        """Draw a rectangle of a kind, or of a colour."""
        given = f' style="fill:{fill}"' if fill else ""
        extra = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in more.items())
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"{given}{extra}/>'
        )

    def line(
        self, x0: float, y0: float, x1: float, y1: float, tip: bool = False, **more: str
    ) -> None:
        """Draw a line, with an arrow's tip at its end where `tip` says so."""
        end = ' marker-end="url(#tip)"' if tip else ""
        extra = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in more.items())
        self._parts.append(
            f'<line class="line" x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}"{end}{extra}/>'
        )

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text("\n".join([*self._parts, "</svg>\n"]))
