"""A convolution as LBANN's package introduces it; `from distconv import ...` before."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

from distconv.lbann import DCTensor, DistConvDDP, ParallelStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--num-shards", type=int, nargs="+", default=[1])
parser.add_argument("--shard-dim", type=int, nargs="+", default=[2])
parser.add_argument("--batch-size", type=int, default=1)
parser.add_argument("--way", default="to_ddp", choices=["to_ddp", "to_replicate", "none"])
parser.add_argument("--grad-reduction-factor", type=float)
args = parser.parse_args()


def layers() -> nn.Module:
    """Return two convolutions."""
    return nn.Sequential(
        nn.Conv2d(4, 8, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 4, kernel_size=5, padding=2, stride=2, padding_mode="circular"),
    )


if "RANK" in os.environ and not dist.is_initialized():
    dist.init_process_group("gloo")
device = torch.device("cpu")
ps = ParallelStrategy(
    num_shards=tuple(args.num_shards), shard_dim=args.shard_dim, device_type=device.type
)

torch.manual_seed(dist.get_rank())  # rank 0's parameters, and the samples of a replica's first rank
x = torch.randn(args.batch_size, 4, 12, 8, device=device, requires_grad=True)
model = layers().to(device)
ddp_model = DistConvDDP(
    model,
    parallel_strategy=ps,
    grad_reduction_factor=args.grad_reduction_factor,
    find_unused_parameters=False,
)

dcx = DCTensor.distribute(x, ps)
dcy = ddp_model(dcx)
y = dcy if args.way == "none" else getattr(dcy, args.way)()
loss = y.square().mean()
loss.backward()
x_grad = dcx.grad.to_replicate()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: shard {ps.shard_ind} of {ps.num_shards}")
