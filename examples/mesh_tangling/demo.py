"""The main job from start to end on four ranks, 2 x 2: generate samples, then train.

python -m examples.mesh_tangling.demo
"""

from __future__ import annotations

from pathlib import Path

from examples.trainer.launch import demo, generated, interrupted, words

from . import generate, train

SAMPLES = {
    "data": {"samples": "192", "size": "128", "seed": "0"},
    "validation": {"samples": "32", "size": "128", "seed": "1"},
}
TRAIN = {
    "network": "2k",
    "width": "0.25",
    "grid": "sample=2,height=2",
    "epochs": "18",
    "batch-size": "8",
    "learning-rate": "0.003",
}


def run(output: Path) -> None:
    """Generate missing files in a folder, and train there, going on with an interrupted run.
    Collective.
    """
    files = generated(output, generate.main, SAMPLES)
    options = TRAIN | files | interrupted(output)
    train.main(words(options | {"output": str(output)}))


if __name__ == "__main__":
    demo("mesh_tangling", __doc__ or "", run)
