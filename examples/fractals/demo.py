"""The fractal benchmark from start to end on four ranks: generate volumes of 32^3 voxels, and train
the U-Net until its validation Dice is 0.95. Smaller than in the benchmark are the network, a
quarter as wide, and the number of classes: 3, where the benchmark has 5.

    python -m examples.fractals.demo
"""

from __future__ import annotations

from pathlib import Path

from examples.trainer.launch import demo, generated, interrupted, words

from . import generate, train

VOLUMES = {"scale": "5", "categories": "3", "seed": "4", "grid": "sample=2,depth=2"}
SAMPLES = {
    "data": {**VOLUMES, "samples": "100", "first": "0"},
    "validation": {**VOLUMES, "samples": "30", "first": "100"},
}
TRAIN = {"channels": "16", "grid": "depth=2,height=2", "epochs": "20"}


def run(output: Path) -> None:
    """Generate missing files in a folder, and train there, going on with an interrupted run.
    Collective.
    """
    files = generated(output, generate.main, SAMPLES)
    options = TRAIN | files | interrupted(output)
    train.main(words(options | {"output": str(output)}))


if __name__ == "__main__":
    demo("fractals", __doc__ or "", run)
