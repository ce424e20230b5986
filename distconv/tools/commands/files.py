"""`python -m distconv infer` and `data`: apply networks to volumes; inspect and convert files."""

from __future__ import annotations

import argparse
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from distconv.data.errors import DataError, together
from distconv.data.sources.interface import Source, import_package
from distconv.data.sources.opening import open_sources, open_stack
from distconv.data.writing.convert import chunks_for_readers, convert
from distconv.geometry.layout import default_cuts, rank_box
from distconv.geometry.topology import AXES, Topology
from distconv.planning.table import byte_size
from distconv.tools import command_line as shared
from distconv.tools.command_line import BadArguments, Command, StatusLine, complaining
from distconv.tools.infer import infer


def _infer_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "the function or class that creates the torch module, in package.module or ./file.py"
    add("factory", metavar="MODULE:FACTORY", help=text)
    text = "a state_dict written by torch.save or safetensors"
    add("--weights", type=Path, required=True, metavar="FILE", help=text)
    text = "the volumes: a file, a folder, or several files"
    add("--input", nargs="+", required=True, metavar="FILE", help=text)
    add("--output", type=Path, required=True, metavar="FILE", help="the file to write")
    shared.add_grid_option(parser)
    add("--field", help="the name of the array in files that hold several")
    add("--stack", action="store_true", help="the input files are planes of one volume")
    add("--autocast", choices=shared.DTYPES[2:], help="the type of autocast around the network")
    add("--argmax", action="store_true", help="write the index of the largest channel")
    add(
        "--slabs",
        type=int,
        help="slabs for each volume (default: the smallest number that fits in memory)",
    )
    add(
        "--memory",
        type=shared.byte_count,
        help="memory of a rank, such as 16GiB (default: the free memory)",
    )
    add("--overwrite", action="store_true", help="replace the output file")
    add("--restart", action="store_true", help="discard the unfinished results of another run")


def _infer(given: argparse.Namespace) -> int:
    grid = shared.grid_of_all_ranks(given.grid, "infer")
    net = shared.made_everywhere(given.factory, 0)
    chosen = {k: getattr(given, k) for k in ("argmax", "slabs", "memory", "overwrite", "restart")}
    chosen |= {"autocast": shared.dtype_named(given.autocast), "field": given.field}
    with complaining(DataError), StatusLine(grid.rank == 0, "reading") as say:
        together(grid, lambda: _load(net, given.weights))
        source: Any = given.input if len(given.input) > 1 else given.input[0]
        if given.stack:
            source, paths = None, source
            source = together(grid, lambda: open_stack(paths, given.field))
            chosen["field"] = None
        infer(net, source, given.output, grid, progress=say, **chosen)
    if grid.rank == 0:
        print(f"wrote {given.output}", flush=True)
    return 0


def _load(net: nn.Module, path: Path) -> None:
    try:
        net.load_state_dict(_weights(path))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--weights {path}: no such file") from error
    except RuntimeError as error:
        raise ValueError(f"{path} holds the weights of another network: {error}") from error


def _weights(path: Path) -> dict[str, Any]:
    """Return the state_dict in a file, which may be its entry "state_dict" or "model".

    No code in the file is run. Raises ValueError for other content.
    """
    if path.suffix == ".safetensors":
        safetensors = import_package("safetensors.torch", f"{path}: reading it", "safetensors")
        return dict(safetensors.load_file(path))
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} is damaged, or holds other objects than tensors; write it by "
            "torch.save(model.state_dict(), ...)"
        ) from error
    for name in ("state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(name), dict):
            found = found[name]
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; expected a state_dict")
    return found


def _data_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "print the content of a file and the bytes that each rank reads; or copy it to zarr"
    add("action", choices=("describe", "convert"), help=text)
    add("input", nargs="+", metavar="FILE", help="a file, a folder, or several files")
    text = "the name of an array in files that hold several; convert takes several"
    add("--field", action="append", default=[], help=text)
    add("--stack", action="store_true", help="the files are planes of one volume")
    metavar, text = "AXIS=RANKS,...", "the grid that will read it, such as depth=4"
    add("--grid", type=shared.grid_axes, default={}, metavar=metavar, help=text)
    add("--output", type=Path, metavar="FOLDER.zarr", help="the zarr folder to write (convert)")
    text = "the extents of its chunks, samples first (default: within the blocks of --grid)"
    add("--chunks", type=shared.shape, metavar="N,C,...", help=text)
    text = "bytes that a rank copies at a time, such as 4GiB (default: 256MiB)"
    add("--memory", type=shared.byte_count, default=2**28, help=text)
    add("--overwrite", action="store_true", help="replace the zarr folder")
    add("--restart", action="store_true", help="discard the unfinished copy of another run")


def _data(given: argparse.Namespace) -> int:
    if min(given.grid.values(), default=1) < 1:
        raise BadArguments("--grid: give every axis its number of ranks, from 1")
    if given.action == "convert":
        return _convert(given)
    shared.check_alone("data describe")
    with complaining(OSError, ValueError, ImportError, TypeError):
        sources = _sources(given)
    for source in sources.values():
        print(_described(source))
        if given.grid:
            print(_read_by_ranks(source, Topology(tuple(given.grid.get(a, 1) for a in AXES))))
    return 0


def _sources(given: argparse.Namespace) -> dict[Any, Source]:
    path: Any = given.input if len(given.input) > 1 else given.input[0]
    if given.stack:
        if len(given.field) > 1:
            raise ValueError(f"--stack reads a single array, not {given.field}; pass one --field")
        return {None: open_stack(path, given.field[0] if given.field else None)}
    return dict(open_sources(path, given.field))


def _convert(given: argparse.Namespace) -> int:
    if given.output is None:
        raise BadArguments("--output is missing; name the zarr folder to write")
    grid = shared.grid_of_all_ranks({"sample": -1}, "data convert")
    chosen = {k: getattr(given, k) for k in ("chunks", "memory", "overwrite", "restart")}
    with complaining(DataError), StatusLine(grid.rank == 0, "reading") as say:
        # A single array needs no name in the result.
        found = together(grid, lambda: _sources(given))
        source: Any = found if len(found) > 1 else next(iter(found.values()))
        convert(source, given.output, grid, readers=given.grid, progress=say, **chosen)
    if grid.rank == 0:
        print(f"wrote {given.output}", flush=True)
    return 0


def _described(source: Source) -> str:
    """Return the text that `data describe` prints about a source."""
    size = source.samples * prod(source.shape) * source.dtype.itemsize
    return "\n".join(
        [
            f"{source.name}: {source.samples} sample(s) of shape {source.shape}, {source.dtype}, "
            f"{byte_size(size)}",
            "not chunked" if source.chunks is None else f"chunks of {source.chunks}",
            *(f"  {name}: {value}" for name, value in source.attributes.items()),
        ]
    )


def _read_by_ranks(source: Source, topology: Topology) -> str:
    """Return the text that `data describe` prints about the blocks that ranks of a grid read."""
    shape = source.shape
    # A sample of three dimensions, with ranks along depth, is a volume without channels.
    bare = len(shape) == 3 and topology.extent("depth") > 1
    whole = (topology.extent("sample"), *((1,) if bare else ()), *shape)
    cuts = default_cuts(len(whole), topology)[1 + bare :]
    boxes = [rank_box(shape, cuts, topology, rank) for rank in range(topology.size)]
    needed = [box.size * source.dtype.itemsize for box in boxes]
    fetched = [source.fetched(box) for box in boxes]
    lines = [
        f"of each sample a rank reads {byte_size(min(needed))} to {byte_size(max(needed))}, and "
        f"fetches {byte_size(min(fetched))} to {byte_size(max(fetched))}"
    ]
    if sum(fetched) > 1.5 * sum(needed):
        lines.append(
            f"the ranks fetch {sum(fetched) / sum(needed):.3g} times the bytes that they need; "
            f"chunks of {chunks_for_readers(source, topology)} would each lie within the block of "
            "one rank, as `data convert` with the same --grid writes them"
        )
    return "\n".join(lines)


INFER = Command("apply a network to whole volumes, from file to file", _infer_options, _infer)
DATA = Command("describe a file of samples, or copy it to zarr", _data_options, _data)
