"""Blocks of DistTensors as chunks of torch.distributed.checkpoint.

A tensor class with these methods is saved and loaded by `torch.distributed.checkpoint` like a
DTensor: each rank writes its own block, and reads its block of what any number of ranks has saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distconv.tensor.base import DistTensorBase

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem


class Chunked(DistTensorBase):
    """A distributed tensor that `torch.distributed.checkpoint` can save and load."""

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return the items to write for this rank's block, of the tensor with the name `fqn`.

        torch writes a block that several ranks hold once.
        """
        from torch import distributed
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if self.grid.size > 1 and not distributed.is_initialized():
            raise RuntimeError(
                "torch.distributed.checkpoint: there is no default group of torch.distributed, and "
                "every rank would write all files; ask for grid.device_mesh before, which "
                "initialises it"
            )
        properties = TensorProperties.create_from_tensor(self.shard)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the position and size of this rank's block; nothing if it alone is empty."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if self.numel() and not self.shard.numel():
            return []
        offsets, sizes = map(torch.Size, (self.box.start, self.shard.shape))
        return [ChunkStorageMetadata(offsets, sizes)]

    def __get_tensor_shard__(self, _: Any) -> Tensor:
        """Return this rank's block, which is written and read in place."""
        return self.shard.detach()
