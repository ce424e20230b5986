"""Reading ahead: the next mini-batches are read while the present one is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Request = TypeVar("Request")
Item = TypeVar("Item")


def prefetched(
    read: Callable[[Request], Item], requests: Iterable[Request], ahead: int = 2
) -> Generator[Item, None, None]:
    """Yield `read(request)` for every request in order, read by one background thread.

    At most `ahead` items are read before they are asked for. An exception of `read` is raised where
    its item would have been yielded. The thread ends with the iteration, also with an abandoned
    one.
    """
    background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
    waiting: deque[Future[Item]] = deque()
    try:
        for request in requests:
            waiting.append(background.submit(read, request))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        background.shutdown(cancel_futures=True)
