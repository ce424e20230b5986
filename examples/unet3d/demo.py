"""The 3-D U-Net from start to end on four ranks: generate volumes of odd sizes, train, and segment
a volume that is eight times as large, cut over all of them.

    python -m examples.unet3d.demo
"""

from __future__ import annotations

from pathlib import Path

from distconv.grid.ranks import world
from examples.trainer.launch import demo, generated, interrupted, words

from . import generate, segment, train

SAMPLES = {
    "data": {"samples": "48", "size": "29,25,27", "seed": "0"},
    "validation": {"samples": "8", "size": "29,25,27", "seed": "1"},
}
TRAIN = {
    "width": "0.25",
    "grid": "sample=2,depth=2",
    "epochs": "30",
    "batch-size": "4",
    "learning-rate": "0.003",
}
SEGMENT = {"size": "57,49,53", "grid": "depth=2,height=2"}


def run(output: Path) -> None:
    """Generate missing files in a folder, train there, going on with an interrupted run, and
    segment. Collective.
    """
    files = generated(output, generate.main, SAMPLES)
    options = TRAIN | files | interrupted(output)
    train.main(["--augment", *words(options | {"output": str(output)})])
    made = {"output": output / "segmentation.zarr", "picture": output / "segmentation.png"}
    options = SEGMENT | {"checkpoint": str(output)} | {n: str(path) for n, path in made.items()}
    segment.main(words(options))
    if world().rank == 0:
        print(f"Look at {made['picture']} as well: a volume eight times as large")


if __name__ == "__main__":
    demo("unet3d", __doc__ or "", run)
