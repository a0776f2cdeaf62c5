"""Runs an iterator ahead of its consumer, in a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Yields the items of ``source``. Up to ``depth`` finished items wait while the thread makes the next one.

    If ``source`` raises an exception, the consumer gets the items before it, and then the exception with its own
    traceback. ``close`` ends the thread after the item that it is making. Without ``close``, the thread ends with the
    process.
    """

    def __init__(self, source: Iterator[Item], depth: int, name: str) -> None:
        assert depth >= 1, f"prefetching {depth} items is not prefetching"
        self._depth = depth
        self._ready: deque[Item] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._produce, args=(source,), name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._closed)
            if self._closed:
                raise StopIteration
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
        if self._error is not None:
            raise self._error
        raise StopIteration

    @property
    def num_ready(self) -> int:
        """Number of finished items that wait."""
        return len(self._ready)

    def close(self) -> None:
        """Drop what is ready and wait for the thread to end. May be called twice."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def _produce(self, source: Iterator[Item]) -> None:
        try:
            for item in source:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._ready) < self._depth or self._closed)
                    if self._closed:
                        return
                    self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as error:  # handed to the consumer, whatever it is
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
