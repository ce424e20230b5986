"""The names of LBANN's PyTorch package DistConv, thin over DistTensors.

A program that was written for `from distconv import DCTensor, DistConvDDP, ParallelStrategy` runs
with `from distconv.lbann import ...`, and with the numbers of the program on one rank a replica.
"""

from distconv.lbann.dc_tensor import DCTensor as DCTensor
from distconv.lbann.ddp import DistConvDDP as DistConvDDP
from distconv.lbann.strategy import ParallelStrategy as ParallelStrategy
