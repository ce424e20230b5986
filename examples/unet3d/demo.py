"""The 3-D U-Net from start to end on four ranks: generate volumes of odd sizes, train, and segment
a volume that is eight times as large, cut over all of them.

    python -m examples.unet3d.demo
"""

from __future__ import annotations

from pathlib import Path

from distconv.data.checkpoint import checkpoints_in
from distconv.transport.world import world
from examples.trainer.launch import demo_output, words

from . import generate, segment, train

SIZE = "29,25,27"
TRAINING = "48"
VALIDATION = "8"
TRAIN = {
    "width": "0.25",
    "grid": "sample=2,depth=2",
    "epochs": "30",
    "batch-size": "4",
    "learning-rate": "0.003",
}
SEGMENT = {"size": "57,49,53", "grid": "depth=2,height=2"}


def main() -> None:
    """Generate missing files in the output folder, train there from the start, and segment."""
    output = demo_output("examples.unet3d.demo", __doc__ or "", Path("runs/demo-unet3d"))
    run(output)


def run(output: Path) -> None:
    """Run the demo on all ranks. Collective."""
    comm = world().for_program()
    files = {"data": (TRAINING, "0"), "validation": (VALIDATION, "1")}
    for name, (samples, seed) in files.items():
        path = output / f"{name}.h5"
        if not comm.bcast(path.exists()):
            options = {"samples": samples, "size": SIZE, "seed": seed, "output": str(path)}
            generate.main(words(options), comm)
    if comm.rank == 0:
        for path in checkpoints_in(output):
            path.unlink()
    comm.bcast(None)
    options = TRAIN | {name: str(output / f"{name}.h5") for name in files} | {"output": str(output)}
    train.main(["--augment", *words(options)], comm)
    options = SEGMENT | {
        "checkpoint": str(output),
        "output": str(output / "segmentation.zarr"),
        "picture": str(output / "segmentation.png"),
    }
    segment.main(words(options), comm)
    if comm.rank == 0:
        print(f"Look at {output / 'segmentation.png'} as well: a volume eight times as large")


if __name__ == "__main__":
    main()
