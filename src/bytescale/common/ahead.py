"""Takes the items of an iterator in a thread, ahead of the loop that uses them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Ahead(Iterator[T], Generic[T]):
    """Iterates over items that a thread makes while the ones before are used. Use it in a ``with`` block.

    An error of the thread is raised when the turn of its item comes, with its own traceback.
    """

    def __init__(self, items: Iterator[T], depth: int, name: str) -> None:
        """``depth``: items that may wait behind the next one. None of them is None. ``name``: of the thread."""
        self._items = items
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._asked = deque(self._thread.submit(next, items, None) for _ in range(depth + 1))  # None: the end

    @property
    def num_ready(self) -> int:
        return sum(item.done() for item in self._asked)

    def __next__(self) -> T:
        item = self._asked[0].result() if self._asked else None  # an error stays, for whoever asks again
        if item is None:
            raise StopIteration
        self._asked.popleft()
        self._asked.append(self._thread.submit(next, self._items, None))
        return item

    def close(self) -> None:
        """Drop what is ready, and wait until the thread has made what it is making. May be called twice."""
        self._thread.shutdown(cancel_futures=True)
        self._asked.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
