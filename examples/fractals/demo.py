"""The fractal benchmark from start to end on four ranks: generate volumes of 32^3 voxels, and train
the U-Net until its validation Dice is 0.95. Smaller than in the benchmark are the network, a
quarter as wide, and the number of classes: 3, where the benchmark has 5.

    python -m examples.fractals.demo
"""

from __future__ import annotations

from pathlib import Path

from distconv.data.checkpoint import checkpoints_in
from distconv.transport.world import world
from examples.trainer.launch import demo_output, words

from . import generate, train

VOLUMES = {"scale": "5", "categories": "3", "seed": "4", "grid": "sample=2,depth=2"}
TRAINING = "100"
VALIDATION = "30"
TRAIN = {"channels": "16", "grid": "depth=2,height=2", "epochs": "20"}


def main() -> None:
    """Generate missing files in the output folder, and train there from the start."""
    run(demo_output("examples.fractals.demo", __doc__ or "", Path("runs/demo-fractals")))


def run(output: Path) -> None:
    """Run the demo on all ranks. Collective."""
    comm = world().for_program()
    files = {"data": (TRAINING, "0"), "validation": (VALIDATION, TRAINING)}
    for name, (samples, first) in files.items():
        path = output / f"{name}.h5"
        if not comm.bcast(path.exists()):
            own = {"samples": samples, "first": first, "output": str(path)}
            generate.main(words(VOLUMES | own), comm)
    if comm.rank == 0:
        for path in checkpoints_in(output):
            path.unlink()
    comm.bcast(None)
    options = TRAIN | {name: str(output / f"{name}.h5") for name in files} | {"output": str(output)}
    train.main(words(options), comm)


if __name__ == "__main__":
    main()
