"""The messages of one member of a grid: around its column and along its row (``grid`` has the steps).

Shape letters: n tokens of a slice; H query heads, G key/value heads, D width of queries and keys, Dv of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from bytescale.attention.blocks import BlockSet
from bytescale.attention.kernels import lse_dtype
from bytescale.attention.rings.exchange import Exchange, Message, Transfer
from bytescale.attention.rings.messages import Field, Kind, RingBuffers, fields_of, message_bytes, message_width
from bytescale.plan import SharedGroup


class Grid:
    """One member's place in a shared group: its neighbours, what arrives at each step, and which blocks to compute."""

    def __init__(
        self,
        shared: SharedGroup,
        exchange: Exchange,
        buffers: RingBuffers,
        blocks_of: Callable[[int, int], list[BlockSet]],
    ) -> None:
        """``blocks_of``: the blocks of a member's queries with another's keys."""
        self.exchange = exchange
        self.buffers = buffers
        self.group = shared.group
        self.size = shared.size
        self.member = shared.member
        self.ranks = shared.ranks
        self.row, self.column = shared.row, shared.column
        self.num_rows, self.num_columns = len(self.column), len(self.row)
        self.columns, self.steps = range(1, self.num_columns), range(1, self.num_rows)
        """The steps of the row and of the column, at which something arrives."""
        self.last_step = self.num_rows - 1
        self.tokens_per_member: list[int] = shared.tokens_per_member.tolist()
        self.blocks: dict[tuple[int, int], list[BlockSet]] = {
            (a, b): blocks_of(self.query_source(a), self.key_source(b))
            for a in range(self.num_columns)
            for b in range(self.num_rows)
            if a or b
        }
        """By (a, b): the queries that arrive at step a of the row, against the keys of step b of the column."""

    @property
    def num_tokens(self) -> int:
        return self.tokens_per_member[self.member]

    def query_source(self, step: int) -> int:
        """Return the member whose queries arrive at a step of the row."""
        return self.row[(self.row.index(self.member) - step) % self.num_columns]

    def key_source(self, step: int) -> int:
        """Return the member whose keys this member holds at a step of the column."""
        return self.column[(self.column.index(self.member) - step) % self.num_rows]

    def held(self, step: int, buffers: Sequence[Tensor]) -> Tensor:
        """Return the rows of the two ``buffers`` with what this member holds at a step of the column."""
        return buffers[step % 2][: self.tokens_per_member[self.key_source(step)]]

    def start_kv(self, step: int, buffers: Sequence[Tensor], kind: Kind) -> Transfer:
        """Pass on the keys and values of the step before, and receive those of ``step``."""
        return self.around_column(self.held(step - 1, buffers), self.held(step, buffers), kind)

    def around_column(self, send: Tensor, receive: Tensor, kind: Kind) -> Transfer:
        """Send to the next member of the column, and receive from the previous one."""
        return self.start(send, self.key_source(-1), receive, self.key_source(1), kind)

    def along_row(self, distance: int, send: Tensor, receive: Tensor, kind: Kind) -> Transfer:
        """Send to the member ``distance`` columns on, and receive from the one as many columns back."""
        return self.start(send, self.query_source(-distance), receive, self.query_source(distance), kind)

    def kv_buffers(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return two buffers for messages of K and V, ``[n, G (D + Dv)]``; n is the longest slice of any member."""
        return self.buffers.take("kv", 2, k, self._kv_shape(k, v), k.dtype)

    def gradient_buffers(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return two buffers for messages of the gradients of K and V, of the same shape."""
        return self.buffers.take("gradients", 2, k, self._kv_shape(k, v), lse_dtype(k.dtype))

    def _kv_shape(self, k: Tensor, v: Tensor) -> tuple[int, int]:
        return max(self.tokens_per_member), message_width(k, v)

    def start(self, send: Tensor, to: int, receive: Tensor, source: int, kind: Kind) -> Transfer:
        """Send to the member ``to``, and receive from the member ``source``."""
        return self.exchange.start(
            send=send, to=self.ranks[to], receive=receive, source=self.ranks[source], tag=kind.tag(self.group)
        )

    def swap(
        self, messages: Sequence[Tensor], room: Sequence[Tensor], kind: Kind, *, forwards: bool = True
    ) -> Transfer:
        """As one operation, send the t-th message to member ``i + t`` and receive from ``i - t``, or the other way."""
        sends: list[Message] = []
        receives: list[Message] = []
        for step, (message, place) in enumerate(zip(messages, room, strict=True), start=1):
            distance = step if forwards else -step
            sends.append((message, self.ranks[(self.member + distance) % self.size]))
            receives.append((place, self.ranks[(self.member - distance) % self.size]))
        return self.exchange.start_all(sends, receives, tag=kind.tag(self.group))


class RowMessages:
    """The messages of one call along a row: the own queries to every column, and results of others' queries home.

    A message is bytes, because its fields have different dtypes (``messages.fields_of``).
    """

    def __init__(
        self, grid: Grid, like: Tensor, queries: list[Field], results: list[Field], kinds: tuple[Kind, Kind]
    ) -> None:
        """``queries`` and ``results``: the fields of a message there and of one home; ``kinds``: what both are."""
        self.grid = grid
        self.queries, self.results = queries, results
        self.kinds = kinds
        self._home: list[Transfer] = []
        others = grid.num_columns - 1
        longest = max(grid.tokens_per_member)

        def take(what: str, count: int, fields: list[Field]) -> list[Tensor]:
            return grid.buffers.take(what, count, like, (message_bytes(fields, longest),), torch.uint8)

        self._own = take("own queries", min(others, 1), queries)
        self._queries = take("queries", others, queries)
        self._results = take("results", others, results)
        self._own_results = take("own results", others, results)

    def fill(self, *values: Tensor) -> None:
        """Copy what belongs to the own queries into the message that is sent to the other columns, if there are any."""
        if not self._own:
            return
        views = fields_of(self._own[0], self.grid.num_tokens, self.queries)
        for view, value in zip(views, values, strict=True):
            view.copy_(value)

    def start(self, step: int) -> Transfer:
        """Pass on the queries of the step before, in a ring around the row, and receive those of ``step``."""
        messages = [*self._own, *self._queries]
        send, receive = (messages[a][: message_bytes(self.queries, self._arriving(a))] for a in (step - 1, step))
        return self.grid.along_row(1, send, receive, self.kinds[0])

    def arrived(self, step: int) -> list[Tensor]:
        """Return the fields of the queries that arrived at ``step``."""
        return fields_of(self._queries[step - 1], self._arriving(step), self.queries)

    def send_home(self, step: int, *values: Tensor) -> None:
        """Start to send the results of the queries that arrived at ``step`` to their owner.

        The previous results have travelled while these were computed. They are waited for, because several messages at
        once would meet in their owners' links.
        """
        if self._home:
            self._home[-1].wait()
        send = self._results[step - 1][: message_bytes(self.results, self._arriving(step))]
        for view, value in zip(fields_of(send, self._arriving(step), self.results), values, strict=True):
            view.copy_(value)
        receive = self._own_results[step - 1][: message_bytes(self.results, self.grid.num_tokens)]
        self._home.append(self.grid.along_row(-step, send, receive, self.kinds[1]))

    def own_results(self) -> Iterator[list[Tensor]]:
        """Wait for the results of the own queries, column by column, and return the fields of each."""
        for transfer, message in zip(self._home, self._own_results, strict=True):
            transfer.wait()
            yield fields_of(message, self.grid.num_tokens, self.results)

    def _arriving(self, step: int) -> int:
        return self.grid.tokens_per_member[self.grid.query_source(step)]


class InTurn:
    """Transfers of which only one is under way at a time. The first starts at once."""

    def __init__(self, starts: Iterable[Callable[[], Transfer]]) -> None:
        self._starts = iter(starts)
        self._current: Transfer | None = None
        self._start_next()

    def wait(self) -> None:
        """Wait for the transfer that is under way, and start the next one."""
        assert self._current is not None, "a call waits once for every transfer"
        self._current.wait()
        self._start_next()

    def _start_next(self) -> None:
        start = next(self._starts, None)
        self._current = None if start is None else start()
