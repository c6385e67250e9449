"""A batch to send: columns of messages, with no Python step for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.client.columns import Texts, as_list, check_form, is_array, is_arrow, no_bodies, numbers
from mqproc.client.properties import check_property_rows
from mqproc.errors import BadMessageError, BadRequestError


class Batch(msgspec.Struct, frozen=True, eq=False):
    """Messages for one topic, column by column.

    bodies: list of bytes, 2-D uint8 array, 'S' array, or Arrow binary or string array.
    keys: None, one key for all, a list with one key or a list of keys for each, or an Arrow string array.
    tags: None, one tag for all, a list, or an Arrow string array.
    queue_id: one queue for all; queue_ids: one for each; neither: the writer goes round the topic's queues.
    sharding_keys: None, one for all, a list, or an Arrow string array; a key's hash picks the queue of its messages,
    and one that has none takes its turn at the queues. No other queue is named then, and messages that wait have one.
    properties: pairs for all messages, or a list with a mapping for each.
    batch: RocketMQ's all-or-nothing batch; its bodies are together no larger than one body may be.
    wait: False answers before the sync of a SYNC_FLUSH store.
    unique: unique ids of one's own: their prefix of 28 characters, and the first counter of at most 65,536.
    delay_level, deliver_at_ms: what all messages wait for; their queue is one for all then. `send_batch` alone takes
    an array with one for each.
    """

    topic: str
    bodies: Any
    keys: Texts = None
    tags: Texts = None
    queue_id: int | None = None
    queue_ids: Any = None
    born_timestamps_ms: Any = None
    properties: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None
    flags: Any = None
    batch: bool = False
    wait: bool = True
    unique: tuple[str, int] | None = None
    delay_level: Any = 0
    deliver_at_ms: Any = 0
    sharding_keys: Texts = None

    def __len__(self) -> int:
        try:
            return len(self.bodies)
        except TypeError:
            raise no_bodies(self.bodies) from None

    def aligned(self) -> Batch:
        """The same with columns that may be cut: each is one for all messages, or has one value for each of them.

        What is cut no longer shows that a column was too long or too short, and none that is sent shall be behind one.
        Raises BadRequestError as the encoding of the whole does.
        """
        count = len(self)
        check_form(self.bodies)
        for texts, name in ((self.keys, "keys"), (self.tags, "tags"), (self.sharding_keys, "sharding keys")):
            _check_texts(texts, count, name)
        if self.properties is not None and not isinstance(self.properties, Mapping):
            check_property_rows(self.properties, count)
        return msgspec.structs.replace(
            self,
            queue_ids=_numbers(self.queue_ids, "i4", count, "queue ids"),
            born_timestamps_ms=_numbers(self.born_timestamps_ms, "i8", count, "born times"),
            flags=_numbers(self.flags, "i4", count, "flags"),
        )

    def checked_unique(self) -> tuple[str, int] | None:
        """The unique ids of one's own. Raises BadRequestError for what is no prefix and counter."""
        if self.unique is None:
            return None
        match self.unique:
            case (str() as prefix, int() | np.integer() as counter):
                return prefix, int(counter)
        raise BadRequestError(f"unique = {repr(self.unique)[:64]}: give None, or a prefix and the first counter")

    def part(self, start: int, stop: int) -> Batch:
        """Messages [start, stop) as a batch; this one is aligned."""
        unique = None if self.unique is None else (self.unique[0], self.unique[1] + start)
        return msgspec.structs.replace(self, unique=unique, **self._columns(lambda column: column[start:stop]))

    def taken(self, places: NDArray[np.int64]) -> Batch:
        """The messages at some places as a batch; it has no unique ids of its own. This one is aligned."""
        return msgspec.structs.replace(self, **self._columns(lambda column: _at(column, places)))

    def _columns(self, change: Callable[[Any], Any]) -> dict[str, Any]:
        """What there is one of for each message, changed."""
        names = ("bodies", "keys", "tags", "queue_ids", "born_timestamps_ms", "properties", "flags", "sharding_keys")
        columns = {name: getattr(self, name) for name in names}
        return {
            name: column if column is None or isinstance(column, str | Mapping) else change(column)
            for name, column in columns.items()
        }


def _at(column: Any, places: NDArray[np.int64]) -> Any:
    if isinstance(column, np.ndarray) or is_arrow(column):
        return column.take(places) if is_arrow(column) else column[places]
    return list(map(column.__getitem__, places.tolist()))


def _check_texts(texts: Texts, count: int, name: str) -> None:
    if texts is None or isinstance(texts, str):
        return
    if not (is_arrow(texts) or is_array(texts)):
        as_list(texts, name)
    if len(texts) != count:
        raise BadMessageError(f"{len(texts):,} {name} for {count:,} bodies")


def _numbers(values: Any, dtype: str, count: int, name: str) -> NDArray[Any] | None:
    return None if values is None else numbers(values, dtype, count, name)
