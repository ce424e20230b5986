"""A server at work: it talks to its clients until the last one has gone, and saves its state."""

from __future__ import annotations

import copy
import io
import os
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from distconv.data.checkpoint import checkpoints_in, load_checkpoint, save_checkpoint, step_of
from distconv.data.durable import read_checksummed
from distconv.grid.process_grid import ProcessGrid
from distconv.grid.stall import time_limit
from distconv.model.parallelize import parallelize
from distconv.training.checks import check_count
from distconv.training.requests import Asking, Connection, Kind, ServerLost, Shards
from distconv.training.server import Due, Report, Rule, Server
from distconv.training.team import SERVER_FOLDER, Team
from distconv.transport.link import Link, LinkLost, Pause, flush


class Method(Protocol):
    """A method by which servers and workers train: `Downpour` or `AsynchronousElastic`."""

    def rule(
        self,
        parameters: Sequence[Parameter],
        buffers: Sequence[Tensor],
        clients: int,
        above: Asking | None,
    ) -> Rule:
        """Return what a server does with what its clients bring."""

    def client(
        self,
        parameters: Sequence[Any],
        buffers: Sequence[Tensor],
        optimizer: Optimizer | None,
        server: Asking,
        steps: int,
    ) -> Any:
        """Return what a client does in its steps."""


class AllWorkersLost(RuntimeError):
    """No worker is left, and none has come to its end."""


def serve(
    team: Team,
    model: nn.Module,
    method: Method,
    *,
    folder: str | os.PathLike[str] | None = None,
    save_every: int | None = 1000,
    keep: int = 2,
    resume: bool | os.PathLike[str] = False,
) -> Report:
    """Serve workers until the last one has come to its end, and return how it went.

    Every rank of a server calls it, while those of workers train with a `Worker`. A worker that is
    lost is dropped, with a warning, and the others go on; where ranks are started by MPI, their
    launcher ends the job instead. A server that is lost ends the job.

    Parameters
    ----------
    model: the same as the workers', which are given these parameters; it is left as it is.
    folder: where this rank saves what it holds, in a folder of its own, every so many updates and
        at the end; see `server_state`. Without, nothing is saved.
    save_every: the number of updates from one checkpoint to the next; None for saving when the
        workers do, by `Worker.save`, and at no other time.
    keep: how many checkpoints there are at most.
    resume: whether to go on from the last checkpoint in `folder`, where there is one; or the
        checkpoint to go on from, by `Team.last_saved`.

    Raises
    ------
    AllWorkersLost
        When the last worker is gone, and none has come to its end; the state is saved before.
    FileExistsError
        Where `folder` holds the state of another run, and this one is not to go on from there;
        clients raise ServerLost with the same words.
    ServerLost
        Where the server above has ended.
    ValueError
        Where the ranks have different models or methods; clients raise ServerLost with the same
        words.
    """
    if not team.serves:
        raise ValueError(
            "serve: this rank is one of a worker; call it where team.serves, and make a Worker here"
        )
    if save_every is not None:
        check_count("serve", "save_every", save_every, 1)
    shards = shards_of_model(model, team)
    part = shards.parts[team.rank % len(shards.parts)]
    shard = parallelize(_only(model, part), ProcessGrid([team.rank], device="cpu"))
    parameters, buffers = list(shard.parameters()), list(shard.buffers())
    above = None
    agreed = described(model, method)
    if team.above:
        above = Connection(team.above, Shards(parameters, buffers, 1), agreed)
    links = dict(enumerate(team.below))
    rule = method.rule(parameters, buffers, len(links), above)
    server = Server(
        parameters,
        buffers,
        rule,
        len(links),
        agreed=agreed,
        above=above,
        save=lambda number: state.save_under(number),
    )
    place = None if folder is None else team.folder(folder)
    state = _State(shard, rule, server, place, save_every, keep)
    try:
        if resume:
            state.load(None if resume is True else Path(resume))
        else:
            state.check_new()
        if above is not None:
            state.take(above.ask(Kind.HELLO).tensors)
        _run(server, links, state)
        rule.finish()
        if above is not None:
            above.ask(Kind.DONE)
    except BaseException as error:
        if isinstance(error, (AllWorkersLost, KeyboardInterrupt, ServerLost)):
            state.save()  # an interrupt may have come within an update
        team.leave(error)
        raise
    state.save()
    team.leave()
    return server.report


def server_state(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the last state that a server has saved, of all its shards: a plain state_dict.

    Raises
    ------
    FileNotFoundError
        Where there is none.
    """
    state: dict[str, Tensor] = {}
    for place in sorted(Path(folder).glob(SERVER_FOLDER.format(rank="*"))):
        for path in checkpoints_in(place)[:1]:
            content = io.BytesIO(read_checksummed(path))
            state |= torch.load(content, map_location="cpu", weights_only=True)["model"]
    if not state:
        raise FileNotFoundError(f"{folder} holds no state of a server")
    return state


def shards_of_model(model: nn.Module, team: Team) -> Shards:
    """Return how a model, which has been parallelized or not, is dealt out to servers."""
    # Those without elements stand for whole ones, also of sharded parameters.
    like = [
        [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in some]
        for some in (model.parameters(), model.buffers())
    ]
    return Shards(like[0], like[1], team.arrangement.shards)


def described(model: nn.Module, method: object) -> str:
    """Return in words what server and clients have to have in common."""
    named = (*model.named_parameters(), *model.named_buffers())
    sizes = [f"{name} {tuple(t.shape)} {t.dtype}".replace("torch.", "") for name, t in named]
    return f"{method}, {', '.join(sizes)}"


class _State:
    """The checkpoints of one rank of a server."""

    def __init__(
        self,
        shard: nn.Module,
        rule: Rule,
        server: Server,
        folder: Path | None,
        save_every: int | None,
        keep: int,
    ):
        self._shard, self._rule, self._server = shard, rule, server
        self._folder, self._every, self._keep = folder, save_every, keep
        self._saved = -1

    def save_if_due(self) -> None:
        """Save the state where enough updates have been made since the last time."""
        if self._every and self._server.report.updates - max(self._saved, 0) >= self._every:
            self.save()

    def save(self) -> None:
        """Save the state, where it has changed since, under the number of its updates."""
        updates = self._server.report.updates
        if self._folder is not None and self._every and updates != self._saved:
            self._save(self._folder, updates)

    def save_under(self, number: int) -> None:
        """Save the state under a number that the workers give."""
        if self._folder is None or self._every:
            raise ValueError(
                f"Worker.save({number}): the server saves "
                + ("nothing" if self._folder is None else f"in every {self._every}-th update")
                + "; call serve with a folder and save_every=None"
            )
        self._save(self._folder, number)

    def _save(self, folder: Path, number: int) -> None:
        report = self._server.report
        save_checkpoint(
            folder,
            self._shard,
            self._rule.optimizer,
            self._rule.scheduler,
            step=number,
            keep=self._keep,
            extra={
                "updates": report.updates,
                "samples": report.samples,
                "staleness": dict(report.staleness),
                "steps": dict(self._server.steps),
            },
        )
        self._saved = report.updates

    def check_new(self) -> None:
        """Raise `FileExistsError` for what another run has learned, which would hide this one's."""
        for newest in [] if self._folder is None else checkpoints_in(self._folder)[:1]:
            if step_of(newest) > 0:
                raise FileExistsError(
                    f"serve: {newest} is of another run; go on from it by resume=True, choose "
                    "another folder, or remove it"
                )

    def load(self, chosen: Path | None) -> None:
        """Go on from a checkpoint, or from the last in the folder, where there is one."""
        path = chosen or self._folder
        if path is None:
            raise ValueError("serve: resume=True needs the folder in which the state was saved")
        rule, server = self._rule, self._server
        missing_ok = chosen is None
        found = load_checkpoint(
            path, self._shard, rule.optimizer, rule.scheduler, missing_ok=missing_ok
        )
        if found is not None:
            server.report.updates = self._saved = found.extra["updates"]
            server.report.samples = found.extra["samples"]
            server.report.staleness = Counter(found.extra["staleness"])
            server.steps = Counter(found.extra["steps"])

    def take(self, tensors: Sequence[Tensor | None]) -> None:
        """Begin with what the server above has."""
        with torch.no_grad():
            own = (*self._shard.parameters(), *self._shard.buffers())
            for tensor, value in zip(own, tensors, strict=True):
                if value is not None:
                    tensor.copy_(value)


def _run(server: Server, links: Mapping[int, Link], state: _State) -> None:
    """Serve until no client is at work."""
    open_links, pause = dict(links), Pause()

    def lose(client: int, why: str) -> Due:
        open_links.pop(client).close()
        if client not in server.active:
            return []  # it has come to its end
        warnings.warn(f"serve: client {client} is dropped: {why}", stacklevel=3)
        return server.drop(client, why)

    while server.active:
        heard = False
        for client in list(open_links):
            if client not in open_links:
                continue
            try:
                request = open_links[client].poll()
            except LinkLost as error:
                request, due = None, lose(client, str(error))
            else:
                due = []
                if request is not None:
                    failed_there = request.numbers[0] == Kind.LEAVE
                    due = (
                        lose(client, "its program has failed")
                        if failed_there
                        else server.handle(client, request)
                    )
            heard |= request is not None
            while due:
                receiver, answer = due.pop(0)
                if receiver not in open_links:
                    continue
                try:
                    open_links[receiver].send(answer)
                except LinkLost as error:
                    due += lose(receiver, str(error))
            if request is not None:
                state.save_if_due()
        if heard:
            pause.wake()
        else:
            pause.rest()
    until = time.monotonic() + time_limit()
    for link in open_links.values():
        with suppress(LinkLost):  # it has come to its end
            flush(link, until)
    lost = server.report.lost
    if len(lost) == len(links):
        raise AllWorkersLost(
            "all workers are lost: "
            + "; ".join(f"client {client}, as {why}" for client, why in lost.items())
        )


def _only(model: nn.Module, part: Sequence[int]) -> nn.Module:
    """Return a copy of a model that has some of its parameters and buffers only, on the host."""
    kept = {
        name
        for i, (name, _) in enumerate((*model.named_parameters(), *model.named_buffers()))
        if i in set(part)
    }
    shard = copy.deepcopy(model).cpu()
    for prefix, module in shard.named_modules():
        for table in (module._parameters, module._buffers):
            for name in table:
                if f"{prefix}.{name}".lstrip(".") not in kept:
                    table[name] = None
    return shard
