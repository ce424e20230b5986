"""Train as Horovod documents it for ImageNet, with gradients of several batches a step."""

import argparse
import math
import os

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import distconv.horovod as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.pth.tar")
parser.add_argument("--batches-per-allreduce", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--base-lr", type=float, default=0.05)
parser.add_argument("--warmup-epochs", type=float, default=1)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=0.01)
parser.add_argument("--clip", type=float, default=0.1)
args = parser.parse_args()


class Metric:
    """An average over steps and ranks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sum = torch.tensor(0.0)
        self.n = torch.tensor(0.0)

    def update(self, val: torch.Tensor) -> None:
        """Take up the values of all ranks."""
        self.sum += hvd.allreduce(val.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self) -> torch.Tensor:
        """Return the average."""
        return self.sum / self.n


def adjust_learning_rate(epoch: float, batch_idx: int) -> None:
    """Warm up to the rate of all ranks together, and let it down by 10 later."""
    if epoch < args.warmup_epochs:
        epoch += float(batch_idx + 1) / len(train_loader)
        lr_adj = 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    else:
        lr_adj = 1.0 if epoch < 30 else 1e-1
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * lr_adj


def train(epoch: int) -> None:
    """Take the steps of an epoch."""
    model.train()
    train_sampler.set_epoch(epoch)
    train_loss = Metric("train_loss")
    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        optimizer.zero_grad()
        # Split data into sub-batches of size batch_size
        for i in range(0, len(data), args.batch_size):
            output = model(data[i : i + args.batch_size])
            loss = F.cross_entropy(output, target[i : i + args.batch_size])
            train_loss.update(loss)
            # Average gradients among sub-batches
            loss.div_(math.ceil(len(data) / args.batch_size))
            loss.backward()
        # Clip the gradients of all ranks
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        with optimizer.skip_synchronize():
            optimizer.step()
    averages.append(train_loss.avg.item())


def save_checkpoint(epoch: int) -> None:
    """Write a checkpoint, on rank 0."""
    if hvd.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))


hvd.init()
torch.manual_seed(42)
averages: list[float] = []

# If set > 0, will resume training from a given checkpoint.
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break
# Horovod: broadcast resume_from_epoch from rank 0 to other ranks.
resume_from_epoch = int(
    hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()
)

generator = torch.Generator().manual_seed(1)
# The last step of an epoch has fewer sub-batches than the others.
dataset = TensorDataset(
    torch.randn(32, 3, 6, 6, generator=generator, dtype=torch.get_default_dtype()),
    torch.randint(5, (32,), generator=generator),
)
train_sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(
    dataset, batch_size=args.batch_size * args.batches_per_allreduce, sampler=train_sampler
)

model = nn.Sequential(
    nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
)
optimizer = optim.SGD(
    model.parameters(),
    lr=args.base_lr * args.batches_per_allreduce * hvd.size(),
    momentum=args.momentum,
    weight_decay=args.wd,
)
# Horovod: wrap optimizer with DistributedOptimizer.
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    backward_passes_per_step=args.batches_per_allreduce,
)
# Horovod: restore on the first worker which will broadcast weights to other workers.
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
# Horovod: broadcast parameters & optimizer state.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(resume_from_epoch, args.epochs):
    train(epoch)
    save_checkpoint(epoch)
