"""Links: messages between two ranks that do not run in step, sent at any time.

A `Transport` carries exchanges of all ranks of a grid together. A link carries requests and answers
of a server and a client while others compute.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

NUMBERS = 6
"""The number of integers before the bytes of each message."""

_SHORTEST, _LONGEST = 1e-5, 2e-3
"""Seconds between two looks for a message, which grow while none comes."""


class LinkLost(ConnectionError):
    """The rank at the other end has ended, or cannot be reached."""


class LinkSilent(LinkLost):
    """The rank at the other end has not sent or received a message in time."""


class Message(NamedTuple):
    """A message: `NUMBERS` integers, and bytes, a tensor in host memory that may be empty."""

    numbers: tuple[int, ...]
    payload: Tensor


class Link(Protocol):
    """One end of a link. Messages arrive whole and in the order in which they were sent."""

    peer: int
    """The rank at the other end, by its number in the job."""

    def send(self, message: Message) -> None:
        """Start to send a message, whose memory must not change; raises LinkLost."""

    def poll(self) -> Message | None:
        """Return the next message if it has arrived, and continue sending; raises LinkLost."""

    @property
    def idle(self) -> bool:
        """Return whether everything has been sent."""

    def close(self) -> None:
        """End the link; later messages from the other end are lost."""


class Pause:
    """Pauses between looks for messages, longer the longer none has come."""

    def __init__(self) -> None:
        self._seconds = _SHORTEST

    def rest(self) -> None:
        """Sleep for the current pause."""
        time.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, _LONGEST)

    def wake(self) -> None:
        """Note that a message has come."""
        self._seconds = _SHORTEST


def receive(link: Link, until: float) -> Message:
    """Return the next message of a link; raises LinkLost, and LinkSilent where none comes in time.

    Parameters
    ----------
    until: the time of `time.monotonic` to wait to, or inf.
    """
    pause = Pause()
    while (message := link.poll()) is None:
        if time.monotonic() > until:
            raise LinkSilent(f"rank {link.peer} has not answered")
        pause.rest()
    return message


def flush(link: Link, until: float) -> None:
    """Return when everything has been sent; nothing may be arriving.

    Raises LinkLost, and LinkSilent where the other end does not receive in time; see `receive`.
    """
    pause = Pause()
    while not link.idle:
        if link.poll() is not None:
            raise LinkLost(f"rank {link.peer} has sent what nobody has asked for")
        if time.monotonic() > until:
            raise LinkSilent(f"rank {link.peer} has not taken what was sent")
        pause.rest()


def message(numbers: Sequence[int], payload: Tensor | None = None) -> Message:
    """Return a message, with zeros in place of missing numbers."""
    filled = (*numbers, *(0,) * (NUMBERS - len(numbers)))
    return Message(filled, torch.empty(0, dtype=torch.uint8) if payload is None else payload)
