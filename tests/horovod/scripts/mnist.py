"""Train on digits, as Horovod documents it for MNIST; `import horovod.torch as hvd` before."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import distconv.horovod as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
args = parser.parse_args()


class Net(nn.Module):
    """Two convolutions, of which one is not used, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, kernel_size=3)
        self.unused = nn.Conv2d(4, 4, kernel_size=3)
        self.fc1 = nn.Linear(36, 8)
        self.fc2 = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logarithms of the probabilities."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2)).flatten(1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


# Horovod: initialize library.
hvd.init()
if torch.cuda.is_available():
    # Horovod: pin GPU to local rank.
    torch.cuda.set_device(hvd.local_rank())
device = "cuda" if torch.cuda.is_available() else "cpu"

generator = torch.Generator().manual_seed(1)
dataset = TensorDataset(
    torch.randn(48, 1, 8, 8, generator=generator, dtype=torch.get_default_dtype()),
    torch.randint(10, (48,), generator=generator),
)
# Horovod: use DistributedSampler to partition the training data.
train_sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(dataset, batch_size=args.batch_size, sampler=train_sampler)

torch.manual_seed(42 + hvd.rank())
model = Net().to(device)

# Horovod: scale learning rate by the number of ranks.
optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)

# Horovod: broadcast parameters & optimizer state.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

# Horovod: (optional) compression algorithm.
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none

# Horovod: wrap optimizer with DistributedOptimizer.
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,
    op=hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)


def metric_average(val: float, name: str) -> float:
    """Return the mean over all ranks."""
    return hvd.allreduce(torch.tensor(val), name=name).item()


losses = []
for epoch in range(args.epochs):
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data.to(device)), target.to(device))
        loss.backward()
        optimizer.step()
        losses.append(metric_average(loss.item(), "avg_loss"))
if hvd.rank() == 0:
    print(f"loss {losses[-1]:.6f} on {hvd.size()} ranks")
