"""`serve`: the loop of a server, which answers clients until the last one has left."""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from distconv.grid.process_grid import ProcessGrid
from distconv.grid.stall import time_limit
from distconv.model.parallelize import parallelize
from distconv.training.checks import check_count
from distconv.training.downpour import Downpour
from distconv.training.elastic import AsynchronousElastic
from distconv.training.history import Validation, check_validation
from distconv.training.requests import Connection, MessageKind, ServerLost, ServerParts, failed
from distconv.training.server import (
    Due,
    MalformedRequest,
    Report,
    Server,
    ServerCheckpoints,
)
from distconv.training.team import Team
from distconv.transport.link import Link, LinkLost, LinkMessage, rest

Method: TypeAlias = Downpour | AsynchronousElastic
"""A training algorithm with servers. It makes a `rule` on each rank of a server, and a `client` on
each rank of a worker."""


class AllWorkersLost(RuntimeError):
    """No worker is left, and none has finished: raised by `serve`."""


def serve(
    team: Team,
    model: nn.Module,
    method: Method,
    *,
    folder: str | os.PathLike[str] | None = None,
    save_every: int | None = 1000,
    keep: int = 2,
    resume: bool | os.PathLike[str] = False,
    validate: Callable[[nn.Module], float | Tensor] | None = None,
    every: int | None = None,
    patience: int | None = None,
    target: float | None = None,
) -> Report:
    """Serve workers until the last one has finished, and return a report of the training.

    Every rank of a server calls `serve`, while the ranks of workers train with a `Worker`. A lost
    worker is dropped with a warning, and the others continue; under MPI, its launcher ends the
    whole job instead. A lost server ends the job.

    Raises AllWorkersLost if all workers are gone and none has finished; the state is saved first.
    With several groups, raises ServerLost if the first server has ended. Raises ValueError if the
    ranks have different models or methods, and FileExistsError if `folder` holds the state of
    another run and `resume` is not given. Raises ValueError if an argument is out of its range, or
    for `validate` if servers have several ranks, none of which holds the whole model. Clients then
    raise ServerLost with the same message.

    The report has the history of losses: those that workers report by `Worker.step(loss=...)`, and
    the results of `validate`. Rank 0 writes the history to `folder` as `history.json`, at each
    validation, at each checkpoint, and at the end. Checkpoints contain the history as well, so that
    a resumed run continues it.

    Parameters
    ----------
    model: the same as the workers', which start with its parameters; it is not changed.
    folder: the folder in which each rank saves the parameters and buffers that it holds, in a
        subfolder; `server_state` reads it. None to save nothing.
    save_every: the number of updates between checkpoints; one more is made at the end. None to save
        only when the workers do, by `Worker.save`.
    keep: the largest number of checkpoints.
    resume: whether to load the last checkpoint in `folder`, if there is one; or the path of a
        checkpoint, from `Team.last_saved`.
    validate: returns the validation loss, lower for a better model, of a copy of the model with the
        server's parameters and buffers: plain torch on the CPU, in evaluation mode, without
        gradients. Rank 0 calls it while the workers continue to compute, but answers them only
        afterwards: it may take DISTCONV_TIMEOUT seconds at most. With several groups the parameters
        are those of the first server.
    every: the number of updates between validations; one more is made at the end.
    patience: the number of validations in succession without a lower loss after which the training
        ends: the server's parameters no longer change, and `Worker.stopped` is True on each worker
        from the server's next answer on. None to continue.
    target: the validation loss at which, or below which, the training ends likewise.

    Examples
    --------
    >>> from functools import partial
    >>> team = dc.training.Team()
    >>> method = dc.training.Downpour(partial(torch.optim.SGD, lr=0.1))
    >>> net = nn.Linear(4, 1)
    >>> def validation_loss(model):
    ...     return model(torch.ones(1, 4)).square().mean()
    >>> if team.serves:
    ...     report = dc.training.serve(team, net, method, validate=validation_loss, every=2)
    ...     best = min(entry.loss for entry in report.history.validation)
    ...     counts = report.updates, report.samples, [x.client for x in report.history.training]
    ... else:
    ...     model = dc.parallelize(net, team.grid)
    ...     with dc.training.Worker(team, model, method) as worker:
    ...         for _ in range(3):
    ...             y = model(dc.distribute_tensor(torch.ones(2, 4), team.grid))
    ...             loss = y.square().mean()
    ...             loss.backward()
    ...             worker.step(samples=2, loss=loss)
    >>> counts if team.serves else (3, 6, [0, 0, 0])
    (3, 6, [0, 0, 0])
    """
    if not team.serves:
        raise ValueError(
            "serve: this rank belongs to a worker; call `serve` if team.serves is true, and "
            "create a Worker on this rank"
        )
    try:
        _check_arguments(team, save_every, validate, every, patience, target)
    except ValueError as error:
        team.leave(error)
        raise
    state = _set_up(team, model, method, folder, save_every, keep)
    server, validation = state.server, None
    if validate is not None and every is not None and server.above is None:
        how = validate, every, patience, target
        validation = Validation(*how, model, server.tensors, server.report.history)
    try:
        state.begin(resume)
        _Service(state, validation, team.below).run()
        state.rule.flush()
        if server.above is not None:
            server.above.ask(MessageKind.DONE)
    except BaseException as error:
        _give_up(team, state, error)
        raise
    state.save()
    team.leave()
    return server.report


def _give_up(team: Team, state: ServerCheckpoints, error: BaseException) -> None:
    """Save the state after an error that allows it, and report the error to servers and clients.

    The state is saved after AllWorkersLost, KeyboardInterrupt and ServerLost.
    """
    try:
        if isinstance(error, (AllWorkersLost, KeyboardInterrupt, ServerLost)):
            state.save()  # an interrupt may have come within an update
    finally:
        team.leave(error)


def _check_arguments(
    team: Team,
    save_every: int | None,
    validate: Callable[[nn.Module], float | Tensor] | None,
    every: int | None,
    patience: int | None,
    target: float | None,
) -> None:
    """Raise ValueError for arguments of `serve` that are out of range, or do not fit the team."""
    if save_every is not None:
        check_count("serve", "save_every", save_every, 1)
    check_validation(validate, every, patience, target)
    if validate is not None and team.arrangement.of_server > 1:
        raise ValueError(
            "serve: validate needs the whole model on one rank, and each of the "
            f"servers={team.arrangement.of_server} holds a part; create a Team(servers=1), or "
            "validate in a worker within `with worker.center():`"
        )


def _set_up(
    team: Team,
    model: nn.Module,
    method: Method,
    folder: str | os.PathLike[str] | None,
    save_every: int | None,
    keep: int,
) -> ServerCheckpoints:
    """Create this rank's server and update rule, and return its `ServerCheckpoints`.

    The arguments are those of `serve`. No communication.
    """
    parts = server_parts_of(model, team).parts
    own = _only(model, parts[team.rank % len(parts)])
    part = parallelize(own, ProcessGrid([team.rank], device="cpu"))
    parameters, buffers = list(part.parameters()), list(part.buffers())
    agreed, clients, above = described(model, method), len(team.below), None
    if team.above:
        above = Connection(team.above, ServerParts(parameters, buffers, 1), agreed)
    rule = method.rule(parameters, buffers, clients, above)
    server = Server(parameters, buffers, rule, clients, agreed=agreed, above=above)
    place = None if folder is None else team.folder(folder)
    history = None if folder is None or team.rank > 0 else Path(folder) / "history.json"
    state = ServerCheckpoints(part, rule, server, place, save_every, keep, history)
    server.save = state.save_under
    return state


def server_parts_of(model: nn.Module, team: Team) -> ServerParts:
    """Divide the tensors of a model, parallelized or not, over the ranks of a server."""
    # Meta tensors have the global shapes, also of sharded parameters, and need no memory.
    like = [
        [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in some]
        for some in (model.parameters(), model.buffers())
    ]
    return ServerParts(like[0], like[1], team.arrangement.of_server)


def described(model: nn.Module, method: object) -> str:
    """Return a text about the model's tensors and the method, which server and clients compare."""
    named = (*model.named_parameters(), *model.named_buffers())
    sizes = [f"{name} {tuple(t.shape)} {t.dtype}".replace("torch.", "") for name, t in named]
    return f"{method}, {', '.join(sizes)}"


class _Service:
    """The loop in which one rank of a server handles requests, until no client is active.

    Parameters
    ----------
    state: the server and its checkpoints.
    validation: None to validate nothing.
    links: the links to the clients, in the order of their numbers.
    """

    def __init__(
        self, state: ServerCheckpoints, validation: Validation | None, links: Sequence[Link]
    ):
        self._state, self._server, self._validation = state, state.server, validation
        self._links, self._clients = dict(enumerate(links)), len(links)

    def run(self) -> None:
        """Handle requests until no client is active. Raises AllWorkersLost if all are lost."""
        self._stop_if_due()
        while self._server.active:
            heard = [self._hear(client) for client in list(self._links) if client in self._links]
            if not any(heard):
                rest(self._links.values())
        until = time.monotonic() + time_limit()
        for link in self._links.values():
            with suppress(LinkLost):  # it has finished
                link.flush(until)
        lost = self._server.report.lost
        if len(lost) == self._clients:
            raise AllWorkersLost(
                "all workers are lost: "
                + "; ".join(f"client {client}, as {why}" for client, why in lost.items())
            )
        self._validate()

    def _hear(self, client: int) -> bool:
        """Handle the next request of `client`, if any, and return whether there was one.

        The loss of a client counts as a request, since updates of other clients may have waited for
        this client.
        """
        try:
            request = self._links[client].poll()
        except LinkLost as error:
            due = self._lose(client, str(error))
        else:
            if request is None:
                return False
            due = self._answers(client, request)
        self._deliver(due)
        updates = self._server.report.updates
        if self._validation is not None and self._validation.is_due(updates):
            self._validate()
            self._stop_if_due()
            self._state.write_history()
        self._state.save_if_due()
        return True

    def _answers(self, client: int, request: LinkMessage) -> Due:
        """Let the server handle a request, and return the answers to send; drop a failed client."""
        if request.numbers[0] == MessageKind.LEAVE:
            return self._lose(client, "its program has failed")
        try:
            return self._server.handle(client, request)
        except MalformedRequest as error:
            with suppress(LinkLost):  # the client ends as well, and knows why
                self._links[client].send(failed(f"client {client} sent {error}"))
            return self._lose(client, f"it has sent a message that is none: {error}")

    def _lose(self, client: int, why: str) -> Due:
        """Close the link of a client, and return the answers that waited for this client alone."""
        self._links.pop(client).close()
        if client not in self._server.active:
            return []  # it has finished
        warnings.warn(f"serve: client {client} is dropped: {why}", stacklevel=3)
        return self._server.drop(client, why)

    def _deliver(self, due: Due) -> None:
        while due:
            client, answer = due.pop(0)
            if client in self._links:
                try:
                    self._links[client].send(answer)
                except LinkLost as error:
                    due += self._lose(client, str(error))

    def _validate(self) -> None:
        report = self._server.report
        if self._validation is not None:
            try:
                self._validation.run(report.updates, report.samples)
            except BaseException:
                self._state.save()  # no update is under way
                raise

    def _stop_if_due(self) -> None:
        if self._validation is not None:
            self._server.report.stopped = self._validation.reason_to_stop()


def _only(model: nn.Module, part: Sequence[int]) -> nn.Module:
    """Return a copy of a model on the CPU, with only the parameters and buffers in `part`.

    `part` has the indices of the kept tensors, counting all parameters first and then all buffers.
    """
    kept = {
        name
        for i, (name, _) in enumerate((*model.named_parameters(), *model.named_buffers()))
        if i in set(part)
    }
    copied = copy.deepcopy(model).cpu()
    for prefix, module in copied.named_modules():
        for table in (module._parameters, module._buffers):
            for name in table:
                if f"{prefix}.{name}".lstrip(".") not in kept:
                    table[name] = None
    return copied
