"""The engines, handlers and metrics of ignite, MONAI and torchmetrics get DistTensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distconv as dc
from tests.packages.training import loader, losses, network, samples
from tests.support.everywhere import WORLD

both = pytest.mark.parallel([1, 2])

pytestmark = pytest.mark.filterwarnings("ignore")


@both
def test_an_engine_of_ignite_trains_with_handlers_and_metrics(folder: Path) -> None:
    engines: Any = pytest.importorskip("ignite.engine")
    from ignite.handlers import Checkpoint, DiskSaver, TerminateOnNan
    from ignite.metrics import MeanSquaredError

    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(network(), grid)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), []

    def step(engine: Any, batch: Any) -> float:
        x, y = batch
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        return found[-1]

    def evaluate(engine: Any, batch: Any) -> Any:
        with torch.no_grad():
            return model(batch[0]), batch[1]

    trainer, evaluator = engines.Engine(step), engines.Engine(evaluate)
    trainer.add_event_handler(engines.Events.ITERATION_COMPLETED, TerminateOnNan())
    if grid.rank == 0:
        saver = Checkpoint({"model": model}, DiskSaver(folder, require_empty=False), n_saved=1)
        trainer.add_event_handler(engines.Events.EPOCH_COMPLETED, saver)
    MeanSquaredError().attach(evaluator, "mse")
    trainer.run(loader(grid), max_epochs=2)
    assert found == pytest.approx(losses(2), rel=1e-12)
    model.eval()
    evaluator.run(loader(grid))
    x, y = samples()
    plain = network()
    plain.load_state_dict(dc.full_state_dict(model))
    expected = (plain.eval()(x) - y).square().sum().item() / 8  # ignite divides by samples
    assert evaluator.state.metrics["mse"] == pytest.approx(expected, rel=1e-6)
    WORLD.barrier()
    assert len(list(folder.iterdir())) == 1


@both
def test_trainers_and_evaluators_of_monai_run_with_their_handlers(folder: Path) -> None:
    monai: Any = pytest.importorskip("monai")
    pytest.importorskip("ignite")
    from monai.data import DataLoader, Dataset, MetaTensor, decollate_batch
    from monai.engines import SupervisedEvaluator, SupervisedTrainer
    from monai.handlers import MeanDice, ValidationHandler, from_engine
    from monai.transforms import Activationsd, AsDiscreted, Compose, EnsureTyped

    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(4, 1, 8, 8, 8, generator=numbers)
    items = [{"image": image, "label": (image > 0).float()} for image in x]
    data = Dataset(items, EnsureTyped(keys=["image", "label"]))
    assert isinstance(data[0]["image"], MetaTensor) and monai.data.get_track_meta()

    def run(grid: dc.ProcessGrid | None) -> tuple[list[float], float]:
        torch.manual_seed(0)
        model: nn.Module = nn.Conv3d(1, 1, 3, padding=1)
        plain, found = DataLoader(data, batch_size=2), []
        mini_batches = plain if grid is None else dc.data.distribute(plain, grid)
        model = model if grid is None else dc.parallelize(model, grid)

        def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            value = nn.functional.binary_cross_entropy_with_logits(y, target)
            found.append(value.item())
            return value

        dice = MeanDice(output_transform=from_engine(["pred", "label"]))
        after = [Activationsd("pred", sigmoid=True), AsDiscreted("pred", threshold=0.5)]
        evaluator = SupervisedEvaluator(
            **{"device": torch.device("cpu"), "val_data_loader": mini_batches, "network": model},
            **{"postprocessing": Compose(after), "key_val_metric": {"dice": dice}},
        )
        trainer = SupervisedTrainer(
            **{"device": torch.device("cpu"), "max_epochs": 2, "train_data_loader": mini_batches},
            **{"network": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)},
            **{"loss_function": loss, "train_handlers": [ValidationHandler(1, evaluator)]},
        )
        trainer.run()
        return found, float(evaluator.state.metrics["dice"])

    grid = dc.ProcessGrid(depth=-1)
    plain_losses, plain_dice = run(None)
    found, dice = run(grid)
    assert found == pytest.approx(plain_losses, rel=1e-5)
    assert dice == pytest.approx(plain_dice, rel=1e-5) and 0 < dice < 1
    (batch,) = DataLoader(data, batch_size=4)
    (distributed,) = dc.data.distribute([batch], grid)
    parts = decollate_batch(distributed)
    assert [tuple(part["image"].shape) for part in parts] == [(1, 8, 8, 8)] * 4
    assert torch.equal(parts[2]["image"].full_tensor(), x[2])


@both
def test_metrics_of_torchmetrics_are_those_of_all_ranks() -> None:
    torchmetrics: Any = pytest.importorskip("torchmetrics")
    grid = dc.ProcessGrid(height=-1)
    x, y = samples()
    parts = [dc.distribute_tensor(t, grid) for t in (x, y)]
    for make in (
        torchmetrics.MeanSquaredError,
        lambda: torchmetrics.regression.MeanAbsoluteError(),
        lambda: torchmetrics.image.PeakSignalNoiseRatio(data_range=4.0),
    ):
        metric, expected = make(), make()
        metric.update(*parts)
        expected.update(x, y)
        assert float(metric.compute()) == pytest.approx(float(expected.compute()), rel=1e-6)
    mean = torchmetrics.MeanMetric()
    for part in parts:
        mean.update(part.square().mean())
    assert float(mean.compute()) == pytest.approx(x.square().mean().item(), rel=1e-6)
