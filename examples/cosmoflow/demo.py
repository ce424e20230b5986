"""CosmoFlow from start to end on four ranks: generate universes, train, and draw estimates for
universes outside the training set.

    python -m examples.cosmoflow.demo
"""

from __future__ import annotations

from pathlib import Path

from distconv.data.checkpoint import checkpoints_in
from distconv.transport.world import world
from examples.trainer.launch import demo_output, words

from . import generate, train

UNIVERSES = {"size": "32", "cell": "8", "grid": "sample=2,depth=2"}
TRAINING = "384"
VALIDATION = "96"
TRAIN = {
    "network": "average",
    "width": "0.5",
    "grid": "sample=2,depth=2",
    "epochs": "20",
    "batch-size": "8",
    "learning-rate": "0.001",
}


def main() -> None:
    """Generate missing files in the output folder, and train there from the start."""
    run(demo_output("examples.cosmoflow.demo", __doc__ or "", Path("runs/demo-cosmoflow")))


def run(output: Path) -> None:
    """Run the demo on all ranks. Collective."""
    comm = world().for_program()
    files = {"data": (TRAINING, "0"), "validation": (VALIDATION, "1")}
    for name, (samples, seed) in files.items():
        path = output / f"{name}.h5"
        if not comm.bcast(path.exists()):
            options = UNIVERSES | {"samples": samples, "seed": seed, "output": str(path)}
            generate.main(words(options), comm)
    if comm.rank == 0:
        for path in checkpoints_in(output):
            path.unlink()
    comm.bcast(None)
    options = TRAIN | {name: str(output / f"{name}.h5") for name in files} | {"output": str(output)}
    train.main(["--augment", *words(options)], comm)


if __name__ == "__main__":
    main()
