"""The Trainer of transformers, and accelerate, train on a grid as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import distconv as dc
from tests.packages.training import hide_launcher, loader, losses, network, samples
from tests.support.everywhere import WORLD

both = pytest.mark.parallel([1, 2])

pytestmark = pytest.mark.filterwarnings("ignore")


class Network(nn.Module):
    """The network with a loss, as models of transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.net(x)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


class Items(Dataset[dict[str, Tensor]]):
    """The samples as dictionaries."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x, y = samples()
        return {"x": x[i], "labels": y[i]}


@both
def test_the_trainer_of_transformers_trains_with_its_loader_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    transformers: Any = pytest.importorskip("transformers")
    grid = dc.ProcessGrid(height=-1)
    hide_launcher(monkeypatch)

    class GridTrainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return dc.data.distribute(DataLoader(self.train_dataset, batch_size=4), grid)

        def is_world_process_zero(self) -> bool:
            return bool(grid.rank == 0)

    arguments = transformers.TrainingArguments(
        str(folder),
        **{"use_cpu": True, "num_train_epochs": 2, "per_device_train_batch_size": 4},
        **{"optim": "sgd", "learning_rate": 0.01, "lr_scheduler_type": "constant"},
        **{"max_grad_norm": 0, "logging_steps": 1, "save_strategy": "no", "report_to": []},
        disable_tqdm=True,
    )
    model = dc.parallelize(Network(), grid)
    trainer = GridTrainer(model=model, args=arguments, train_dataset=Items())
    trainer.train()
    found = [float(one["loss"]) for one in trainer.state.log_history if "loss" in one]
    assert found == pytest.approx(losses(2), rel=1e-4)  # the Trainer rounds losses, in float32
    reached = [p.detach().sum().item() for p in model.parameters()]
    assert len(set(map(tuple, WORLD.allgather(reached)))) == 1


@both
def test_accelerate_steps_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    grid = dc.ProcessGrid(height=-1)
    hide_launcher(monkeypatch)
    accelerator = accelerate.Accelerator(cpu=True)
    model = dc.parallelize(network(), grid)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.01))
    found = []
    for x, y in loader(grid):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found == pytest.approx(losses(1), rel=1e-12)
