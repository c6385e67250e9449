"""Append plans, and templates of frames that the kernel encodes without Python.

A template has the common properties of one producer's frames; an AppendPlan is one frame of it. The kernel's table
(`kernels.append_run`) has a row with precomputed data for each template, found by the bytes of a frame's request
options. A template is added after its first frame was appended by itself. All are dropped when one may have become
stale: a topic was widened or deleted, an option changed, or the table is full.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.config.options import Options
from mqproc.kernels import append_frame as frame
from mqproc.kernels import append_run as kernel
from mqproc.kernels.append_run import ITEMS, KEY_BYTES_MAX, NOT_READ, PREFIX_DIGITS, read_options
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout import record
from mqproc.layout.frame import HEADER, HEADER_SIZE

BODY_SIZE_ANY: Final = (1 << 31) - 1
"""Upper bound of any body size."""
TABLE_BYTES: Final = 1 << 20
QUEUES_MAX: Final = 1 << 16
COMMIT_BYTES: Final = 256 << 10
"""A run of frames is written and published after this many bytes, so that dispatch runs in parallel."""
ANSWERS_BYTES: Final = 1 << 20
"""Buffer for answers that wait for publication; a frame of more than 52,000 messages is appended by itself."""


class RenderedTemplate(NamedTuple):
    """A template's precomputed bytes for an appender with these options.

    `before_id` are the bytes before the prefix of the unique id: the fixed part of a record with its variable fields
    zeroed, the topic and constant properties. `after_id` are the constant properties after it. `constants` are words of
    the kernel's state.
    """

    options: Options
    before_id: bytes
    after_id: bytes
    constants: bytes


class AppendTemplate(msgspec.Struct, eq=False):
    """The fields of a frame that depend neither on its messages nor on its time.

    `magic` and `topic_block`: see `topic_fields`. `queue_numbers`: int64[queues of the topic]. `fixed_queue`: a queue
    id, −1 for round-robin, −2 if a column has the queue ids. `parts`: constant properties before the unique id, between
    it and the tag, before and after the keys, see `kernels.append_frame`. `prefix_size`: length of the unique id's
    prefix, which each frame brings. `sharding_at`: position of a sharding key in the first part. `reusable`: later
    frames may use this template; then `columns` are bits of `kernels.append_run`. `copies`: the messages are copies of
    stored ones, which may exceed today's `max_message_size`. `real_topic` and `real_queues`: name and queue numbers of
    the destination of delayed messages. `delayed_template`: the template that messages whose time has come by now would
    have had if they were sent earlier, for deduplication. `queues`: the first queues of the topic, which the frame may
    use, 0 for all. `rendered`: cache of the appender.
    """

    magic: int
    topic_block: NDArray[np.uint8]
    queue_numbers: NDArray[np.int64]
    fixed_queue: int
    parts: tuple[bytes, bytes, bytes, bytes]
    born_host: bytes
    prefix_size: int = 0
    sharding_at: int = 0
    flag: int = 0
    sys_flag: int = 0
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    batch: bool = False
    reusable: bool = False
    copies: bool = False
    columns: int = 0
    real_topic: bytes = b""
    real_queues: NDArray[np.int64] | None = None
    delayed_template: AppendTemplate | None = None
    queues: int = 0
    rendered: RenderedTemplate | None = None


class AppendPlan(msgspec.Struct, eq=False):
    """One frame ready for the kernel, derived from an append request and its topic.

    `columns` are the positions of the payload's columns in the kernel's order, −1 for an absent one. `rotation` is the
    queue of the first message under round-robin, and after the append that of the next message. `unique_prefix` has
    the template's `prefix_size`; `unique_counter` is −1 without unique ids.
    """

    template: AppendTemplate
    payload: NDArray[np.uint8]
    count: int
    columns: tuple[int, ...]
    rotation: int
    born_timestamp_ms: int
    unique_prefix: bytes = b""
    unique_counter: int = -1


def topic_fields(topic: str) -> tuple[int, NDArray[np.uint8]]:
    """(magic, length-prefixed topic); magic V2 above 127 characters, as in RocketMQ."""
    name = topic.encode()
    if len(topic) > record.TOPIC_V1_CHARACTERS_MAX:
        return record.MAGIC_V2, np.frombuffer(len(name).to_bytes(2, "big") + name, np.uint8)
    return record.MAGIC_V1, np.frombuffer(len(name).to_bytes(1, "big") + name, np.uint8)


def rendered_head(template: AppendTemplate, store_host: bytes) -> bytes:
    """The fixed part of a record up to its body length; fields that vary in a frame are zero."""
    sys_flag = template.sys_flag & ~(record.SYS_FLAG_BORN_HOST_V6 | record.SYS_FLAG_STORE_HOST_V6)
    sys_flag |= record.SYS_FLAG_BORN_HOST_V6 if len(template.born_host) == record.HOST_V6_SIZE else 0
    sys_flag |= record.SYS_FLAG_STORE_HOST_V6 if len(store_host) == record.HOST_V6_SIZE else 0
    fixed = record.HEAD.pack(0, template.magic, 0, 0, template.flag, 0, 0, sys_flag, 0)
    tail = record.TAIL.pack(template.reconsume_times, template.prepared_transaction_offset, 0)
    return fixed + template.born_host + bytes(8) + store_host + tail


def render(template: AppendTemplate, options: Options, store_host: bytes, record_size_max: int) -> RenderedTemplate:
    """Precompute a template for an appender with these options."""
    transaction = template.sys_flag & record.SYS_FLAG_TRANSACTION_MASK
    born_extra = len(template.born_host) - record.HOST_V4_SIZE
    store_extra = len(store_host) - record.HOST_V4_SIZE
    first, second, third, fourth = map(len, template.parts)
    first += template.prefix_size
    head, topic = rendered_head(template, store_host), template.topic_block.tobytes()
    constants = frame.CONSTANTS.pack(
        template.fixed_queue,
        template.queues or len(template.queue_numbers),
        transaction in (0, record.SYS_FLAG_COMMIT),
        BODY_SIZE_ANY if template.copies else options.max_message_size,
        record_size_max,
        options.enabled_append_prop_crc,
        record.BODY + born_extra + store_extra,
        record.STORE_TIMESTAMP + born_extra,
        first,
        first + second,
        first + second + third,
        first + second + third + fourth,
        template.sharding_at,
        0,
        len(head),
        len(topic),
        len(head) + len(topic),
        0,
    )
    return RenderedTemplate(options, head + topic + template.parts[0], b"".join(template.parts[1:]), constants)


class AppendTemplates:
    """The kernel's template table of one appender, with the current run and its answers."""

    def __init__(
        self, max_queues: int, rounds: NDArray[np.int64] | None = None, commit_bytes: int = COMMIT_BYTES
    ) -> None:
        """Make an empty table.

        `rounds` int64[max_queues] has the round-robin position of each topic, indexed by the number of the topic's
        first queue. The kernel stops when `commit_bytes` are staged.
        """
        self.run = np.zeros(kernel.RUN_WORDS, np.int64)
        self.words = self.run.data
        """The same memory as a memoryview, which yields Python integers."""
        self.table = np.zeros(kernel.BYTES_AT + TABLE_BYTES, np.uint8)
        self.key = np.zeros(KEY_BYTES_MAX, np.uint8)
        self.queue_numbers = np.zeros(QUEUES_MAX, np.int64)
        self.rounds = np.zeros(max_queues, np.int64) if rounds is None else rounds
        self.touched = np.zeros(2 * max_queues, np.int64)
        self.answers = np.zeros(ANSWERS_BYTES, np.uint8)
        self.views = self.answers.data
        self._found = np.zeros(ITEMS, np.int64)
        self._topics: dict[int, int] = {}
        self._options = self.table.data[kernel.OPTIONS_AT : kernel.BYTES_AT]
        self._rows = self._bytes = self._numbers = 0
        self.words[kernel.COMMIT_BYTES] = commit_bytes
        self.clear()
        self.clear_touched()

    # The current run

    def begin(self, at: int, end: int) -> None:
        """Start a run of whole frames in [at, end) of a buffer."""
        self.words[kernel.AT], self.words[kernel.END] = at, end

    @property
    def at(self) -> int:
        """Position of the current or next frame."""
        return self.words[kernel.AT]

    def skip_to(self, at: int) -> None:
        """Continue at `at`: the frame before it is handled or rejected."""
        self.words[kernel.AT], self.words[kernel.ROW] = at, -1

    def set_answer_options(self, options: bytes, time_at: int) -> None:
        """Set the options of all answers, with the store time as a big-endian word at `time_at`."""
        self.words[kernel.ANSWER_OPTIONS_SIZE] = len(options)
        self.words[kernel.ANSWER_TIME_AT] = time_at
        self._options[: len(options)] = options

    def set_store_time(self, store_timestamp_ms: int) -> None:
        """Set the store timestamp of the next records."""
        self.words[kernel.STORED_AT_MS] = store_timestamp_ms

    @property
    def stored_at_ms(self) -> int:
        """Store timestamp of the records that are appended."""
        return self.words[kernel.STORED_AT_MS]

    @property
    def answers_end(self) -> int:
        """End of the encoded answers in `answers`."""
        return self.words[kernel.ANSWERS_AT]

    def answers_between(self, start: int, end: int) -> list[tuple[int, int]]:
        """(operation with ANSWER, request id) of the answers in [start, end)."""
        found = []
        while start < end:
            _, _, operation, request_id, options_size, _, payload_size = HEADER.unpack_from(self.views, start)
            found.append((operation, request_id))
            start += HEADER_SIZE + options_size + payload_size
        return found

    def clear_answers(self) -> None:
        """Empty the answer buffer after sending."""
        self.words[kernel.ANSWERS_AT] = 0

    # Queues with unpublished next offsets

    def touch(self, numbers: NDArray[np.int64]) -> None:
        """Add queues by number."""
        noted = self.words[kernel.TOUCHED]
        if noted > len(self.touched) // 2:
            distinct = np.unique(self.touched[:noted])
            noted = len(distinct)
            self.touched[:noted] = distinct
        self.touched[noted : noted + len(numbers)] = numbers
        self.words[kernel.TOUCHED] = noted + len(numbers)

    def clear_touched(self) -> None:
        """Forget all touched queues and the current frame."""
        self.words[kernel.TOUCHED] = 0
        self.words[kernel.TOUCHED_TOPIC] = self.words[kernel.ROW] = -1

    # The table

    def clear(self) -> None:
        """Drop all templates. Rows are reused, so the last touched topic is forgotten, too."""
        self.words[kernel.TOUCHED_TOPIC] = -1
        self.run[kernel.SLOTS_AT : kernel.ROWS_AT] = 0
        self._topics.clear()
        self._rows = self._numbers = 0
        self._bytes = kernel.BYTES_AT

    def add(self, options: memoryview, template: AppendTemplate, rendered: RenderedTemplate, *, answered: bool) -> None:
        """Add a row for frames with these options, unless it exists or the texts are too long."""
        size = read_options(as_kernel_array(options), 0, len(options), self._found, 0, self.key)
        if size == NOT_READ or kernel.find_row(self.run, self.table, self.key, size) >= 0:
            return
        texts = len(rendered.before_id) + len(rendered.after_id)
        queues = len(template.queue_numbers)
        new_numbers = 0 if int(template.queue_numbers[0]) in self._topics else queues
        if texts + PREFIX_DIGITS > kernel.SCRATCH_BYTES or queues > QUEUES_MAX:
            return
        if (
            self._rows == kernel.ROWS_MAX
            or self._bytes + size + texts > len(self.table)
            or self._numbers + new_numbers > QUEUES_MAX
        ):
            self.clear()
        row = kernel.ROWS_AT + self._rows * kernel.ROW_WORDS
        self._fill(row, template, rendered)
        run = self.words
        run[row + kernel.KEY_AT] = self._put(self.key[:size].tobytes())
        run[row + kernel.KEY_SIZE] = size
        run[row + kernel.KEY_HASH] = hashed = int(kernel.key_hash(self.key, size))
        run[row + kernel.ANSWERED] = answered
        slot = hashed % kernel.SLOTS
        while run[kernel.SLOTS_AT + slot]:
            slot = (slot + 1) % kernel.SLOTS
        self._rows += 1
        run[kernel.SLOTS_AT + slot] = self._rows

    def _fill(self, row: int, template: AppendTemplate, rendered: RenderedTemplate) -> None:
        """Fill a row from its template. Constant properties are assembled per frame."""
        run = self.words
        state = np.frombuffer(rendered.constants, np.int64).copy()
        first = frame.FIXED_QUEUE
        parts = int(state[frame.PARTS_AT - first])
        at = self._put(rendered.before_id)
        run[row + kernel.COLUMNS] = template.columns
        run[row + kernel.BEFORE_AT], run[row + kernel.BEFORE_SIZE] = at + parts, len(rendered.before_id) - parts
        run[row + kernel.AFTER_AT], run[row + kernel.AFTER_SIZE] = (
            self._put(rendered.after_id),
            len(rendered.after_id),
        )
        round_of = run[row + kernel.ROUND] = int(template.queue_numbers[0])
        state[frame.HEAD_AT - first] += at
        state[frame.TOPIC_AT - first] += at
        state[frame.PARTS_AT - first] = kernel.SCRATCH_AT
        state[frame.NUMBERS_AT - first] = self._numbers_of(round_of, template.queue_numbers)
        self.run[row + kernel.CONSTANTS : row + kernel.ROW_WORDS] = state

    def _numbers_of(self, round_of: int, numbers: NDArray[np.int64]) -> int:
        """Start of a topic's queue numbers in the shared column, added on first use."""
        at = self._topics.get(round_of)
        if at is None:
            at = self._topics[round_of] = self._numbers
            self._numbers += len(numbers)
            self.queue_numbers[at : self._numbers] = numbers
        return at

    def _put(self, data: bytes) -> int:
        """Append bytes to the table; returns their position."""
        at = self._bytes
        self._bytes += len(data)
        self.table[at : self._bytes] = np.frombuffer(data, np.uint8)
        return at
