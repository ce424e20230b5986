"""CosmoFlow from start to end on four ranks: generate universes, train, and draw estimates for
universes outside the training set.

    python -m examples.cosmoflow.demo
"""

from __future__ import annotations

from pathlib import Path

from examples.trainer.launch import demo, generated, interrupted, words

from . import generate, train

UNIVERSES = {"size": "32", "cell": "8", "grid": "sample=2,depth=2"}
SAMPLES = {
    "data": {**UNIVERSES, "samples": "384", "seed": "0"},
    "validation": {**UNIVERSES, "samples": "96", "seed": "1"},
}
TRAIN = {
    "network": "average",
    "width": "0.5",
    "grid": "sample=2,depth=2",
    "epochs": "20",
    "batch-size": "8",
    "learning-rate": "0.001",
}


def run(output: Path) -> None:
    """Generate missing files in a folder, and train there, going on with an interrupted run.
    Collective.
    """
    files = generated(output, generate.main, SAMPLES)
    options = TRAIN | files | interrupted(output)
    train.main(["--augment", *words(options | {"output": str(output)})])


if __name__ == "__main__":
    demo("cosmoflow", __doc__ or "", run)
