"""Decode and encode with the autoencoders of image and video generators, cut over four ranks.

    python -m examples.vae.demo

Each network runs on one rank, cut over two and over four, and in the tiles of diffusers. It needs
diffusers (`pip install diffusers`) and matplotlib. Interrupted, the same command leaves out the
networks that it has measured.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from distconv.data.durable import write_atomically
from distconv.grid.ranks import world
from distconv.planning.table import byte_size, markdown, table
from examples.trainer.launch import demo
from examples.trainer.logs import write_json

from .measure import Half, compare
from .networks import AUTOENCODERS
from .plots import plot_seams

SIZES = {"images": 256, "videos": 128}
"""Pixels along a side."""

_HEADS = ("network", "call", "images", "way", "seconds", "memory", "error")


def run(output: Path) -> None:
    """Measure all networks; write the table as a page, and a picture of the seams. Collective.

    The rows of each network are kept in a file; one with a file is not measured anew.
    """
    torch.set_num_threads(1)
    comm = world().for_program()
    if comm.rank == 0:
        output.mkdir(parents=True, exist_ok=True)
    rows: list[list[str]] = []
    for autoencoder in AUTOENCODERS:
        size = SIZES["images" if autoencoder.frames in (None, 1) else "videos"]
        kept, mine = output / f"{autoencoder.name}.json", []
        if comm.bcast(kept.exists()):
            rows += json.loads(kept.read_text()) if comm.rank == 0 else []
            continue
        for half in compare(autoencoder, size, comm):
            if comm.rank == 0:
                new = rows_of(half)
                mine += new
                print(table([_HEADS, *new], right=(4, 5, 6)), end="\n\n", flush=True)
                if half.call == "decode":
                    plot_seams(output / f"{autoencoder.name}.png", half)
        if comm.rank == 0:
            write_json(kept, mine)
        rows += mine
    if comm.rank == 0:
        page = markdown([_HEADS, *rows], right=(4, 5, 6)) + "\n"
        write_atomically(output / "vae.md", lambda file: file.write(page.encode()))
        print(f"Look at {output / 'vae.md'} and at the pictures beside it")


def rows_of(half: Half) -> list[list[str]]:
    """Return a row for each way, in the order of the heads."""
    about = half.autoencoder, half.call, "x".join(map(str, half.pixels))
    return [
        [
            *about,
            way.name,
            f"{way.seconds:.2f}",
            byte_size(way.bytes),
            "" if way is half.ways[0] else f"{half.error(way):.1e}",
        ]
        for way in half.ways
    ]


if __name__ == "__main__":
    demo("vae", __doc__ or "", run)
