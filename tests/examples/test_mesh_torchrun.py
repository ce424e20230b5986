"""The mesh-tangling run under torchrun: the numbers of one rank, also after a restart.

This test launches a job of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distconv.data.checkpoint import checkpoints_in
from examples.mesh_tangling.train import main
from tests.support.jobs import LIMIT, end_of, forked, started, torchrun
from tests.support.mesh_runs import REPOSITORY, arguments, write_file


def results(output: Path) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of all steps, and the parameters after the last one."""
    history = json.loads((output / "metrics.json").read_text())["history"]
    state = torch.load(checkpoints_in(output)[0], weights_only=True)["model"]
    return [loss for epoch in history for loss in epoch["step_losses"]], state


KILLED = """
import os, signal, sys
from pathlib import Path
from distconv.data.checkpoint import checkpoints_in
from examples.mesh_tangling import train
from examples.trainer.progress import Progress

def killing(progress, loss, samples, step=Progress.step):
    # In the second epoch, before the second checkpoint, and not again.
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if checkpoints_in(Path({output!r})):
            os.kill(os.getpid(), signal.SIGKILL)
    step(progress, loss, samples)

Progress.step = killing
train.main()
"""


@pytest.mark.timeout(3 * LIMIT)
def test_torchrun_trains_to_the_numbers_of_one_rank_though_it_loses_a_rank(tmp_path: Path) -> None:
    file, script = tmp_path / "data.h5", tmp_path / "killed.py"
    write_file(file, samples=4)
    script.write_text(KILLED.format(output=str(tmp_path / "broken")))
    command = [*torchrun(2), "--max-restarts=1", *forked(script)]
    words = arguments(file, tmp_path / "broken", {"height": 2}, 3)
    end = end_of(started([*command, *words], PYTHONPATH=str(REPOSITORY)), LIMIT)
    assert end.returncode == 0, end.stderr
    # What is at hand of the first attempt is its first epoch, which was not trained again.
    assert "Signal 9" in end.stderr or "-9" in end.stderr
    assert end.stdout.count("validation: ") == 3
    main(arguments(file, tmp_path / "alone", {}, 3))
    (losses, state), (expected, whole) = (results(tmp_path / name) for name in ("broken", "alone"))
    assert len(losses) == 3
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(state, whole, rtol=1e-8, atol=1e-10)
