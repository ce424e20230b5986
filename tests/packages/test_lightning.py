"""Lightning trains on a grid as on one device, and rank 0 alone writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distconv as dc
from tests.packages.training import loader, losses, network
from tests.support.everywhere import WORLD

both = pytest.mark.parallel([1, 2])

pytestmark = pytest.mark.filterwarnings("ignore")


@both
def test_checkpoints_and_logs_are_written_once_and_losses_are_the_serial_ones(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lightning: Any = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from distconv.lightning import GridStrategy

    grid = dc.ProcessGrid(height=-1)
    seen: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = dc.parallelize(network(), grid)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x), y)
            seen.append(loss.item())
            self.log("loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            x, y = batch
            self.log("validation", nn.functional.mse_loss(self.net(x), y))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def trainer(epochs: int) -> Any:
        return lightning.Trainer(
            **{"accelerator": "cpu", "strategy": GridStrategy(grid), "devices": 1},
            **{"max_epochs": epochs, "logger": CSVLogger(folder), "log_every_n_steps": 1},
            callbacks=[
                ModelCheckpoint(monitor="validation", save_last=True),
                EarlyStopping("validation", patience=3),
            ],
        )

    first = trainer(2)
    first.fit(Module(), loader(grid), loader(grid))
    assert seen == pytest.approx(losses(2), rel=1e-12)
    assert (first.global_rank, first.world_size) == (WORLD.rank, WORLD.size)
    assert first.is_global_zero == (WORLD.rank == 0)
    assert len(set(WORLD.allgather(first.checkpoint_callback.best_model_path))) == 1
    WORLD.barrier()
    (version,) = (folder / "lightning_logs").iterdir()
    assert (version / "metrics.csv").exists() and (version / "checkpoints" / "last.ckpt").exists()
    state = torch.load(version / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]
    assert set(state) == {f"net.{name}" for name in network().state_dict()}
    assert all(type(value) is torch.Tensor for value in state.values())
    again = trainer(3)
    again.fit(Module(), loader(grid), loader(grid), ckpt_path=version / "checkpoints" / "last.ckpt")
    assert seen == pytest.approx(losses(3), rel=1e-12)
    assert ("Epoch" in capfd.readouterr().out) == (WORLD.rank == 0)
