"""The main job from start to end: generate samples, then train on four ranks, 2 x 2.

python -m examples.mesh_tangling.demo
"""

from __future__ import annotations

import argparse
from pathlib import Path

from distconv.data.checkpoint import checkpoints_in
from examples.trainer.launch import become_ranks, words

from .generate import generate

RANKS = 4
SIZE = 128
TRAINING = 192
VALIDATION = 32
TRAIN = {
    "network": "2k",
    "width": "0.25",
    "grid": "sample=2,height=2",
    "epochs": "18",
    "batch-size": "8",
    "learning-rate": "0.003",
}


def main() -> None:
    """Generate missing files in the output folder and train there, from the start."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.mesh_tangling.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), help="folder (default %(default)s)"
    )
    output = parser.parse_args().output
    files = {"data": (TRAINING, 0), "validation": (VALIDATION, 1)}
    for name, (samples, seed) in files.items():
        path = output / f"{name}.h5"
        if not path.exists():
            print(f"generating {samples} samples of {SIZE} x {SIZE} zones in {path}", flush=True)
            generate(path, samples, SIZE, seed)
    for path in checkpoints_in(output):
        path.unlink()
    options = TRAIN | {name: str(output / f"{name}.h5") for name in files} | {"output": str(output)}
    become_ranks(RANKS, "examples.mesh_tangling.train", words(options))


if __name__ == "__main__":
    main()
