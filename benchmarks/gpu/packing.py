"""Boxes of a block into one message: a copy for each, one torch call, or one kernel for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.clock import Run, alternate
from benchmarks.halo import plan_of
from benchmarks.measuring.report import Row, over
from benchmarks.measuring.settings import by
from distconv import DistTensor
from distconv.device import cupy_nccl
from distconv.geometry.layout import default_cuts
from distconv.planning.dry_run import DryRunGrid
from distconv.planning.table import byte_size
from distconv.tensor.dist_tensor import local_box

CASES: tuple[tuple[tuple[int, ...], dict[str, int]], ...] = (
    ((1, 16, 1024, 1024), {"height": 4}),
    ((1, 16, 1024, 1024), {"height": 4, "width": 4}),
    ((1, 384, 64, 64), {"height": 4, "width": 4}),
    ((1, 16, 256, 256, 256), {"depth": 4}),
    ((1, 16, 256, 256, 256), {"depth": 4, "height": 4, "width": 4}),
)
"""Global shapes, and cuts whose middle rank has 2, 8, 8, 2 and 26 neighbours."""

DIMENSIONS = 5
FIELDS = 3 + 2 * DIMENSIONS
"""Numbers that describe a box: where it starts in the block and in the message, its elements, and
its sizes and strides, filled up by 1 and 0 in front."""

SOURCE = """
extern "C" __global__ void pack(const WORD* block, WORD* message, const long long* boxes)
{
    const long long* box = boxes + FIELDS * blockIdx.y;
    const long long* sizes = box + 3;
    const long long* strides = sizes + DIMENSIONS;
    const unsigned count = box[2];
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count)
        return;
    unsigned rest = i;
    long long place = box[0];
    for (int d = DIMENSIONS - 1; d >= 0; d--) {
        const unsigned n = sizes[d];
        place += rest % n * strides[d];
        rest /= n;
    }
    message[box[1] + i] = block[place];
}
""".replace("FIELDS", str(FIELDS)).replace("DIMENSIONS", str(DIMENSIONS))
"""A thread for each element, a row of blocks for each box. WORD has the size of an element."""
WORDS = {2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
THREADS = 256


def described(block: Tensor, places: Sequence[Tensor]) -> np.ndarray:
    """Return the table of the kernel: a row for each box, in the order of the message."""
    first = block.storage_offset()
    table, start = [], 0
    for place in places:
        missing = DIMENSIONS - place.dim()
        sizes, strides = (1,) * missing + place.shape, (0,) * missing + place.stride()
        table.append((place.storage_offset() - first, start, place.numel(), *sizes, *strides))
        start += place.numel()
    return np.array(table, dtype=np.int64)


class OneKernel:
    """Pack boxes of a block by one kernel of cupy's on torch's current stream."""

    def __init__(self, block: Tensor, places: Sequence[Tensor], message: Tensor):
        import cupy

        self._pack = cupy.RawKernel(SOURCE.replace("WORD", WORDS[message.element_size()]), "pack")
        stream = torch.accelerator.current_stream()
        self._stream = cupy.cuda.ExternalStream(cupy_nccl.address_of(stream))
        boxes = torch.from_numpy(described(block, places)).to(message.device)
        self._tensors = block, message, boxes
        largest = max(place.numel() for place in places)
        self._blocks = -(-largest // THREADS), len(places)

    def __call__(self) -> None:
        """Start the kernel."""
        with self._stream:
            self._pack(self._blocks, (THREADS,), tuple(t.data_ptr() for t in self._tensors))


def packings(
    shape: tuple[int, ...], cut: dict[str, int], device: torch.device, seconds: float
) -> Iterator[Row]:
    """Yield two rows for each way to pack the halos that a 3x3 convolution sends of a block."""
    grid = DryRunGrid(cut)
    with device:
        shard = torch.randn(local_box(shape, grid).shape)
    routes = plan_of(DistTensor(shard, shape, default_cuts(len(shape), grid.topology), grid)).sends
    places = [shard[box] for route in routes for box in route.boxes]
    sizes = [place.numel() for place in places]
    message = shard.new_empty(sum(sizes))
    parts = [p.view(q.shape) for p, q in zip(message.split(sizes), places, strict=True)]

    def copies() -> None:
        for part, place in zip(parts, places, strict=True):
            part.copy_(place)

    copies()
    expected = message.clone()
    axes = ", ".join(f"{axis}={n}" for axis, n in cut.items())
    case = f"{len(places)} boxes, {byte_size(message.nbytes)} of {by(shard.shape)}"
    row = "packing", case, f"{by(shape)}, {axes}"
    ways: dict[str, Callable[[], Run]] = {
        "torch._foreach_copy_": lambda: partial(torch._foreach_copy_, parts, places)
    }
    if cupy_nccl.why_unavailable(device.type) is None:
        ways["one kernel"] = lambda: OneKernel(shard, places, message)
    for name, make in ways.items():
        pack = make()
        message.zero_()
        pack()
        if not torch.equal(message, expected):
            raise RuntimeError(f"{name} packs something else")
        times, bound = alternate(device, [pack, copies], seconds)
        yield over(row, f"{name}, over a copy for each box", times.device, bound.device, None)
        yield over(row, f"host: {name}, over a copy for each box", times.host, bound.host, None)
