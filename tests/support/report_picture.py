"""The picture of docs/howto/reports.md: a figure as the report of `predict` has it.

`python -m tests.support.report_picture` draws it again.
"""

from __future__ import annotations

import re

from distconv.planning import Machine, predict
from distconv.tools.reports.pages import prediction_page
from examples.mesh_tangling.network import mesh_unet
from tests.support.pages import ROOT

PICTURE = ROOT / "docs/howto/report_step.svg"


def drawn() -> str:
    """Return a predicted step of a U-Net on four ranks as the report draws it: SVG."""
    machine = Machine.load("h100").in_graph()
    found = predict(mesh_unet(), (4, 18, 256, 256), {"sample": 2, "height": 2}, machine=machine)
    (figure,) = re.findall(r"<svg.*?</svg>", prediction_page(found, machine), re.DOTALL)
    return f"{figure}\n"


if __name__ == "__main__":
    PICTURE.write_text(drawn())
