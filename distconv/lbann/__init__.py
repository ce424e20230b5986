"""The classes of LBANN's PyTorch package DistConv, as thin layers over DistTensors.

A program written for `from distconv import DCTensor, DistConvDDP, ParallelStrategy` runs with `from
distconv.lbann import ...`. The results equal those of the same program with one rank for each
replica.
"""

from distconv.lbann.dc_tensor import DCTensor as DCTensor
from distconv.lbann.dc_tensor import ParallelStrategy as ParallelStrategy
from distconv.lbann.dc_tensor import backward_halo_exchange as backward_halo_exchange
from distconv.lbann.dc_tensor import forward_halo_exchange as forward_halo_exchange
from distconv.lbann.ddp import DistConvDDP as DistConvDDP
