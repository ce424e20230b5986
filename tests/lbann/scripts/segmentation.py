"""Training steps of a segmentation of volumes: the calls of LLNL's fractal benchmark."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distconv.lbann import DCTensor, DistConvDDP, ParallelStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--num-shards", type=int, nargs=3, default=[1, 1, 1])
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--half", action="store_true")
args = parser.parse_args()
CLASSES = 3


class DoubleConv(nn.Sequential):
    """Two convolutions, each with group norm and ReLU."""

    def __init__(self, inward: int, outward: int) -> None:
        layers: list[nn.Module] = []
        for entering in (inward, outward):
            layers += [nn.Conv3d(entering, outward, 3, padding=1, bias=False)]
            layers += [nn.GroupNorm(2, outward), nn.ReLU(inplace=True)]
        super().__init__(*layers)


class UNet(nn.Module):
    """A U-Net of two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.inc = DoubleConv(3, 4)
        self.down = nn.Sequential(nn.MaxPool3d(2), DoubleConv(4, 8))
        self.up = nn.ConvTranspose3d(8, 4, kernel_size=2, stride=2)
        self.conv = DoubleConv(8, 4)
        self.outc = nn.Conv3d(4, CLASSES, kernel_size=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, 3, D, H, W) to logits of the classes."""
        skip = self.inc(x)
        x = self.up(self.down(skip))
        missing = [skip.size(d) - x.size(d) for d in (4, 3, 2)]
        if any(missing):
            x = F.pad(x, [n for m in missing for n in (m // 2, m - m // 2)])
        return self.outc(self.conv(torch.cat([skip, x], dim=1)))


class SpatialAllReduce(torch.autograd.Function):
    """Add up over the ranks of a mesh; each has the gradient of its own part."""

    @staticmethod
    def forward(ctx, x, mesh):
        """Return the sum."""
        total = x.clone()
        for dim in range(mesh.ndim if mesh is not None else 0):
            dist.all_reduce(total, op=dist.ReduceOp.SUM, group=mesh.get_group(dim))
        return total

    @staticmethod
    def backward(ctx, grad):
        """Return the gradient as it comes."""
        return grad, None


def dice(prediction, target, mesh):
    """Return the Dice score of every sample and class."""
    dims = (-1, -2, -3)
    both = 2.0 * (prediction * target).sum(dim=dims)
    either = prediction.sum(dim=dims) + target.sum(dim=dims)
    both, either = SpatialAllReduce.apply(torch.stack([both, either]), mesh).unbind()
    either = torch.where(either == 0, both, either)
    return (both + 1e-6) / (either + 1e-6)


def loss_of(logits, labels, weights, mesh):
    """Return cross entropy weighted by class, and the Dice loss of the foreground."""
    log_probabilities = F.log_softmax(logits.to(weights.dtype), dim=1)
    entropy = F.nll_loss(log_probabilities, labels, weight=weights, reduction="none").sum()
    normalizer = weights.to(dtype=entropy.dtype)[labels].sum()
    entropy, normalizer = SpatialAllReduce.apply(torch.stack([entropy, normalizer]), mesh)
    one_hot = F.one_hot(labels, CLASSES).permute(0, 4, 1, 2, 3).to(log_probabilities.dtype)
    score = dice(log_probabilities.exp(), one_hot, mesh)[:, 1:].mean()
    return entropy / normalizer.clamp_min(1e-9) + (1.0 - score), score


def parts_of(model):
    """Return an optimizer and its schedule."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)


def batch_of(step, replica):
    """Return volumes and masks of a replica."""
    g = torch.Generator().manual_seed(100 * step + replica)
    images = torch.randn(2, 3, *SIZE, generator=g, dtype=torch.get_default_dtype())
    return images, torch.randint(CLASSES, (2, *SIZE), generator=g)


def shard_of(x, dims):
    """Return this rank's block of a sample, as a data set reads it."""
    for dim, parts, index in zip(dims, ps.num_shards, ps.shard_ind, strict=True):
        x = x.tensor_split(parts, dim)[index]
    return x


SIZE = (8, 10, 8)
if "RANK" in os.environ and not dist.is_initialized():
    dist.init_process_group("gloo")
ps = ParallelStrategy(num_shards=args.num_shards, shard_dim=[2, 3, 4], device_type="cpu")
spatial_mesh = ps.device_mesh[ps.distconv_dim_names]
ddp_group = ps.device_mesh["ddp"].get_group()

torch.manual_seed(dist.get_rank())
model = DistConvDDP(UNet(), parallel_strategy=ps, device_ids=None, output_device=None)
optimizer, scheduler = parts_of(model)
weights = torch.tensor([1.1, 2.0, 2.0], dtype=torch.get_default_dtype())
losses = []
for step in range(args.steps):
    images, masks = batch_of(step, ps.ddp_ind)
    images_dc = DCTensor.from_shard(shard_of(images, ps.shard_dim), ps)
    masks_dc = DCTensor.from_shard(shard_of(masks.unsqueeze(1), ps.shard_dim), ps)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.half):
        logits = model(images_dc)
        with torch.autocast("cpu", enabled=False):
            loss, score = loss_of(logits, masks_dc.squeeze(1), weights, spatial_mesh)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    sums = torch.tensor([loss.item() * images_dc.shape[0], images_dc.shape[0]])
    dist.all_reduce(sums, group=ddp_group)
    losses.append((sums[0] / sums[1]).item())

model.eval()
with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.half):
    logits = model(images_dc)
    chosen = F.one_hot(logits.argmax(dim=1), CLASSES).permute(0, 4, 1, 2, 3)
    truth = F.one_hot(masks_dc.squeeze(1), CLASSES).permute(0, 4, 1, 2, 3)
    hard = dice(chosen.to(logits.dtype), truth.to(logits.dtype), spatial_mesh)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: losses {losses}")
