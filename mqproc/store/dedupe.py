"""Duplicate suppression: drop messages with the topic and unique id of a recent message.

For delayed messages, which wait in a system topic, the destination topic counts as well.

    frame ──ids──▶ window: no hit ──▶ appended as it is, added to the window
                           hits ────▶ verified against the log; only new messages are appended; the answer
                                      has the positions of the stored messages

The window is the writer's private memory. A successor, and each start, rebuilds it from the tail of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.errors import BadMessageError
from mqproc.ipc.control_words import Words
from mqproc.kernels import dedupe as kernel
from mqproc.kernels.append_frame import ANSWER_BYTES_PER_MESSAGE, UNIQUE_DIGITS, UNPUBLISHED_FRAMES
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout import control
from mqproc.layout import queue_table as table_layout
from mqproc.store.commitlog.append import CommitLogAppender
from mqproc.store.commitlog.append_templates import AppendPlan, AppendTemplate
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.table import QueueTable

# Columns of a plan by index: bytes per message of fixed-width columns; the length column of each variable-width one.
_WIDTHS = {0: 4, 2: 2, 4: 2, 6: 2, 8: 8, 9: 4, 10: 4, 11: 8, 12: 2}
_LENGTHS = {1: 0, 3: 2, 5: 4, 7: 6, 13: 12}
_PROPERTY_LENGTHS, _PROPERTIES = 6, 7
_PREFIX_DIGITS = 28
_COUNTERS = 1 << 16
_NO_WORDS = np.empty(0, np.int64)


class _Ids:
    """Unique ids of a frame: `places` int64[2 × count] into `texts`, and `hashes` int64[count]."""

    __slots__ = ("hashes", "places", "texts")

    def __init__(self, plan: AppendPlan) -> None:
        lengths, properties = plan.columns[_PROPERTY_LENGTHS], plan.columns[_PROPERTIES]
        composed = lengths < 0 and plan.unique_counter >= 0
        prefix = as_kernel_array(plan.unique_prefix if composed else b"")
        generated = np.empty((_PREFIX_DIGITS + UNIQUE_DIGITS) * plan.count if composed else 0, np.uint8)
        self.places = np.empty(2 * plan.count, np.int64)
        payload = as_kernel_array(plan.payload)
        kernel.locate_ids(payload, plan.count, lengths, properties, plan.unique_counter, prefix, generated, self.places)
        self.texts = generated if composed else payload
        self.hashes = self.hashes_in(plan.template)

    def hashes_in(self, template: AppendTemplate) -> NDArray[np.int64]:
        """Hashes of the ids in a template's topics."""
        hashes = np.empty(len(self.places) // 2, np.int64)
        topic_block, real_topic = as_kernel_array(template.topic_block), as_kernel_array(template.real_topic)
        kernel.hash_ids(self.texts, self.places, topic_block, real_topic, hashes)
        return hashes

    def __getitem__(self, index: int) -> bytes:
        at, size = self.places[2 * index : 2 * index + 2].tolist()
        return self.texts[at : at + size].tobytes()


class DedupeWindow:
    """The newest `capacity` messages with a unique id. `dropped` counts duplicates."""

    def __init__(
        self, words: Words, table: QueueTable, segments: LogSegments, appender: CommitLogAppender, capacity: int
    ) -> None:
        self._words = words
        self._table = table
        self._segments = segments
        self._appender = appender
        self._ring = np.zeros(kernel.ENTRY_WORDS * capacity, np.int64)
        self._slots = np.full(1 << (2 * capacity - 1).bit_length(), kernel.NONE, np.int64)
        self._window = np.zeros(kernel.WINDOW_SIZE, np.int64)
        self._capacity = capacity
        self.dropped = 0
        self._read_log()

    def __len__(self) -> int:
        return int(self._window[kernel.COUNT])

    def add(self, plan: AppendPlan, store_timestamp_ms: int, publish: Callable[[], None]) -> NDArray[np.uint8]:
        """Append a frame without its duplicates; their answers have the stored messages' positions.

        `publish` is called when a duplicate is not published yet. Raises BadMessageError for a batch of which only
        some messages are duplicates: it could not be stored atomically.
        """
        self._forget_rolled_back()
        ids = _Ids(plan)
        answer = np.empty(ANSWER_BYTES_PER_MESSAGE * plan.count, np.uint8)
        stored = self._find_duplicates(plan, ids, answer, publish)
        repeated = _repeated_in_frame(plan, ids)
        if stored is None and not repeated:
            answer = self._appender.add(plan, store_timestamp_ms)
            self._remember(ids.hashes, answer[: 8 * plan.count].view(np.int64))
            return answer
        dropped = np.zeros(plan.count, np.bool_) if stored is None else stored
        dropped[list(repeated)] = True
        self._add_rest(plan, store_timestamp_ms, ids, dropped, answer)
        for later, first in repeated.items():
            _copy_row(answer, plan.count, first, later)
        self.dropped += int(dropped.sum())
        return answer

    def _forget_rolled_back(self) -> None:
        """Remove messages at or above the end of the log: their append was rolled back."""
        kernel.remove_from(self._appender.end, self._ring, self._slots, self._window)

    def _remember(self, hashes: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        kernel.insert(hashes, places, self._ring, self._slots, self._window)

    def _find_duplicates(
        self, plan: AppendPlan, ids: _Ids, answer: NDArray[np.uint8], publish: Callable[[], None]
    ) -> NDArray[np.bool_] | None:
        """Find duplicates, and put their positions into the answer; None without any.

        A message whose delivery time has passed may have been stored earlier as a delayed message.
        """
        found = self._find_in_topics(plan.template, ids, ids.hashes, answer, publish)
        delayed = plan.template.delayed_template
        if delayed is None:
            return found
        earlier = self._find_in_topics(delayed, ids, ids.hashes_in(delayed), answer, publish)
        return found if earlier is None else earlier if found is None else found | earlier

    def _find_in_topics(
        self,
        template: AppendTemplate,
        ids: _Ids,
        hashes: NDArray[np.int64],
        answer: NDArray[np.uint8],
        publish: Callable[[], None],
    ) -> NDArray[np.bool_] | None:
        """Duplicates in the topics of one template."""
        places = np.empty(len(hashes), np.int64)
        if not kernel.lookup(hashes, self._ring, self._slots, places):
            return None
        if int(places.max()) >= self._words[control.WRITTEN]:
            publish()
            self._forget_rolled_back()
            kernel.lookup(hashes, self._ring, self._slots, places)
        written = self._words[control.WRITTEN]
        held = 0
        for start in sorted({self._segments.start_of(place) for place in places[places >= 0].tolist()}):
            held += self._confirm(start, written, template, ids, places, answer)
        # A mapping would keep the space of a segment that retention deletes.
        self._segments.close()
        return places >= 0 if held else None

    def _confirm(
        self,
        start: int,
        written: int,
        template: AppendTemplate,
        ids: _Ids,
        places: NDArray[np.int64],
        answer: NDArray[np.uint8],
    ) -> int:
        """Number of hits in a segment that are duplicates; other hits are removed from `places`."""
        try:
            view = self._segments.view(start)
        except FileNotFoundError:
            inside = (places >= start) & (places < start + self._segments.segment_size)
            places[inside] = kernel.NONE
            return 0
        return int(
            kernel.verify_duplicates(
                view,
                start,
                written,
                ids.texts,
                ids.places,
                as_kernel_array(template.topic_block),
                as_kernel_array(template.real_topic),
                self._deleted_at(template),
                template.queue_numbers,
                self._table.cells,
                places,
                answer,
            )
        )

    def _deleted_at(self, template: AppendTemplate) -> int:
        """Where the log ended when the destination topic of delayed messages was last deleted."""
        if template.real_queues is None:
            return 0
        words = table_layout.entry_word(0, table_layout.DELETED_AT) + table_layout.ENTRY_WORDS * template.real_queues
        return int(self._table.cells[words].max())

    def _add_rest(
        self,
        plan: AppendPlan,
        store_timestamp_ms: int,
        ids: _Ids,
        dropped: NDArray[np.bool_],
        answer: NDArray[np.uint8],
    ) -> None:
        """Append the runs of new messages; nothing is appended if one of them is invalid."""
        if plan.template.batch and not dropped.all():
            raise BadMessageError(f"{int(dropped.sum())} of the batch's {plan.count} messages are stored already")
        self._appender.check(plan, store_timestamp_ms)
        frames = self._words[control.APPENDED_FRAMES]
        for start, stop in _runs(~dropped):
            part = part_of(plan, start, stop)
            found = self._appender.add(part, store_timestamp_ms)
            plan.rotation = part.rotation
            _copy_rows(found, answer, plan.count, start, stop)
            self._remember(ids.hashes[start:stop], found[: 8 * (stop - start)].view(np.int64))
        self._count_as_one(self._words[control.APPENDED_FRAMES] - frames)

    def _count_as_one(self, runs: int) -> None:
        """Count one frame per request: the kernel counted one per run, or none."""
        self._words.add(control.APPENDED_FRAMES, 1 - runs)
        if runs:
            self._words.add(UNPUBLISHED_FRAMES, 1 - runs)

    def _read_log(self) -> None:
        """Fill the window, oldest first, from the last segments of the log that have enough ids."""
        begin, end = self._words[control.MIN_PHYSICAL_OFFSET], self._words[control.WRITTEN]
        size = self._segments.segment_size
        starts: list[int] = []
        missing = self._capacity
        start = self._segments.start_of(max(end - 1, 0))
        while missing > 0 and start + size > begin and start < end:
            count = self._read_segment(start, begin, end, _NO_WORDS)
            if count < 0:
                break
            starts.append(start)
            missing -= count
            start -= size
        for start in reversed(starts):
            self._read_segment(start, begin, end, self._ring)
        self._segments.close()

    def _read_segment(self, start: int, begin: int, end: int, ring: NDArray[np.int64]) -> int:
        """Number of records with an id in a segment, added to a nonempty `ring`; −1 if deleted."""
        try:
            view = self._segments.view(start)
        except FileNotFoundError:
            return -1
        first = max(begin, start) - start
        stop = min(end - start, len(view))
        return int(kernel.insert_from_log(view, first, stop, start, ring, self._slots, self._window))


def _repeated_in_frame(plan: AppendPlan, ids: _Ids) -> dict[int, int]:
    """Duplicates within a frame: index → index of the first message with the same unique id."""
    if plan.columns[_PROPERTY_LENGTHS] < 0:
        return {}  # Generated from a counter, hence distinct.
    known = ids.hashes[ids.hashes != kernel.NO_ID]
    if len(np.unique(known)) == len(known):
        return {}
    first: dict[bytes, int] = {}
    found: dict[int, int] = {}
    for index in np.flatnonzero(ids.hashes != kernel.NO_ID).tolist():
        earlier = first.setdefault(ids[index], index)
        if earlier != index:
            found[index] = earlier
    return found


def _runs(kept: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """[start, stop) of each run of True."""
    edges = np.flatnonzero(np.diff(kept, prepend=False, append=False))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def part_of(plan: AppendPlan, start: int, stop: int) -> AppendPlan:
    """Messages [start, stop) of a frame as a separate frame."""
    parts: list[NDArray[np.uint8]] = []
    columns: list[int] = []
    at = 0
    for index, position in enumerate(plan.columns):
        if position < 0:
            columns.append(position)
            continue
        begin, end = _extent(plan, index, position, start, stop)
        parts.append(plan.payload[begin:end])
        columns.append(at)
        at += end - begin
    counter = (plan.unique_counter + start) % _COUNTERS if plan.unique_counter >= 0 else plan.unique_counter
    payload, count = np.concatenate(parts), stop - start
    return msgspec.structs.replace(plan, payload=payload, count=count, columns=tuple(columns), unique_counter=counter)


def _extent(plan: AppendPlan, index: int, position: int, start: int, stop: int) -> tuple[int, int]:
    """Byte range of a column's messages [start, stop) in the payload."""
    if index in _WIDTHS:
        return position + _WIDTHS[index] * start, position + _WIDTHS[index] * stop
    width = _WIDTHS[_LENGTHS[index]]
    lengths_at = plan.columns[_LENGTHS[index]]
    lengths = plan.payload[lengths_at : lengths_at + width * plan.count].view(f"<u{width}")
    begin = position + int(lengths[:start].sum(dtype=np.int64))
    return begin, begin + int(lengths[start:stop].sum(dtype=np.int64))


def _columns_of(answer: NDArray[np.uint8], count: int) -> tuple[NDArray[Any], ...]:
    """An answer's columns: physical offsets, queue offsets, queue ids."""
    offsets = answer[: 16 * count].view(np.int64)
    return offsets[:count], offsets[count:], answer[16 * count :].view(np.int32)


def _copy_rows(part: NDArray[np.uint8], answer: NDArray[np.uint8], count: int, start: int, stop: int) -> None:
    for source, target in zip(_columns_of(part, stop - start), _columns_of(answer, count), strict=True):
        target[start:stop] = source


def _copy_row(answer: NDArray[np.uint8], count: int, source: int, target: int) -> None:
    for column in _columns_of(answer, count):
        column[target] = column[source]
