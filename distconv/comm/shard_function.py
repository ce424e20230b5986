"""Autograd functions on shards, applied without what torch does for functions of any program."""

from __future__ import annotations

import torch
from torch.autograd import Function


class ShardFunction(Function):
    """A function of autograd that is applied to shards, which torch.func never transforms.

    `Function.apply` looks through the arguments for wrappers of torch.func each time, in Python.
    """

    apply = vars(torch._C._FunctionBase)["apply"]
