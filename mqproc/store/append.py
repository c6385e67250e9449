"""Appending to the CommitLog: the writer's half of the engine.

Frames are encoded by the kernel into one hot staging buffer, which is given to `pwrite` when it is full, when a
segment ends, or at `write_out`. Nothing is visible before `publish`, which stores the shared words in this order:
`written`, the touched queues' `next_offset`, `table_at`. What is counted is counted by the kernel, and taken back with
what is not published. `reserved_end` is stored before the bytes, so that a
successor knows what may lie behind `written` and zeroes it.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mqproc.config import Options
from mqproc.control_words import why_read_only
from mqproc.errors import (
    BadMessageError,
    BadPropertyError,
    DiskFullError,
    InternalError,
    MessageTooLargeError,
    MqprocError,
    NoSuchQueueError,
    PropertiesTooLargeError,
    StoreBusyError,
    StoreReadOnlyError,
)
from mqproc.io import StoreIO, reason_of
from mqproc.ipc.words import Words
from mqproc.kernels import append as kernel
from mqproc.kernels import append_frame as frame
from mqproc.kernels.append_run import BEHIND_MAX, append_alone, append_run, publish_touched
from mqproc.layout import control as words_of
from mqproc.layout import properties, record
from mqproc.layout import queue_table as table_layout
from mqproc.layout.record_codec import encode_blank
from mqproc.store.final_syncs import Syncing
from mqproc.store.frames import AppendPlan, FrameShape, RenderedShape, render
from mqproc.store.known_shapes import KnownShapes
from mqproc.store.queue_table import QueueTable
from mqproc.store.segments import LogSegments
from mqproc.store.succession import clear_unpublished

STAGING_BYTES_MIN = 1 << 20
# Frames of a step are written and published together up to this much, so that dispatch goes on beside the step.
COMMIT_BYTES = 256 << 10


class CommitLogAppender:
    """The end of the log. One object in one process: the writer.

    `wait_for_segment(start)` is called when the segment that begins at `start` is not there yet; it returns when it
    is, or raises DiskFullError or StoreBusyError.
    """

    def __init__(
        self,
        io: StoreIO,
        syncs: Syncing,
        options: Options,
        words: Words,
        table: QueueTable,
        segments: LogSegments,
        store_host: bytes,
        wait_for_segment: Callable[[int], None],
        rounds: NDArray[np.int64] | None = None,
        commit_bytes: int = COMMIT_BYTES,
    ) -> None:
        """`rounds` int64[max_queues]: which queue the round of each topic is at, by the number of its first queue.

        A run is interrupted when `commit_bytes` are staged, so that they can be published.
        """
        self._io = io
        self._syncs = syncs
        self._options = options
        self._words = words
        self._cells = words.cells
        self._table = table
        self._segments = segments
        self.store_host = store_host
        self._wait_for_segment = wait_for_segment
        self.segment_size = segments.segment_size
        record_max = options.max_message_size + record.RECORD_OVERHEAD_MAX
        self._staging = np.zeros(max(STAGING_BYTES_MIN, min(record_max, self.segment_size)), np.uint8)
        self._record_size_max = self._largest_record()
        self._state = np.frombuffer(words.mapping, np.int64)
        self._constants = memoryview(words.mapping)[frame.CONSTANTS_AT : frame.CONSTANTS_AT + frame.CONSTANTS.size]
        self._next_offsets = np.zeros(table.capacity, np.int64)
        rounds = np.zeros(table.capacity, np.int64) if rounds is None else rounds
        self.known = KnownShapes(table.capacity, rounds, commit_bytes)
        self.known.words[BEHIND_MAX] = options.max_dispatch_behind_bytes
        self._use_staging()
        self._publish_touched = functools.partial(
            publish_touched, table.cells, self.known.run, self._next_offsets, self.known.touched
        )
        self._staged = 0
        self._end = self._file_end = words[words_of.WRITTEN]
        self._segment_end = segments.start_of(self._end) + segments.segment_size
        self._fds: dict[int, int] = {}
        self.last_store_timestamp_ms = words[words_of.WRITTEN_STORE_TIMESTAMP_MS]
        self.read_next_offsets()

    @property
    def end(self) -> int:
        """Position behind the last encoded record, published or not."""
        return self._end

    @property
    def staged_bytes(self) -> int:
        """Bytes encoded and not yet given to the file."""
        return self._staged

    def set_options(self, options: Options) -> None:
        """Take a new `max_message_size`."""
        self._options = options
        self.known.forget()
        self.known.words[BEHIND_MAX] = options.max_dispatch_behind_bytes
        self._record_size_max = self._largest_record()
        self._stage_up_to(self._record_size_max)

    def _stage_up_to(self, size: int) -> None:
        """Have room for a record of `size` bytes."""
        if len(self._staging) < size:
            self._write_staged_or_full()
            self._staging = np.zeros(size, np.uint8)
            self._use_staging()

    def _have_room_for(self, plan: AppendPlan) -> None:
        """Copies may be of messages that were taken when `max_message_size` was larger."""
        size = min(len(plan.payload) + record.RECORD_OVERHEAD_MAX, self.segment_size - record.BLANK_SIZE)
        try:
            self._stage_up_to(size)
        except MqprocError:
            self.take_back()
            raise

    def _largest_record(self) -> int:
        """RocketMQ's own limit, or what a segment takes."""
        record_max = self._options.max_message_size + record.RECORD_OVERHEAD_MAX
        return min(record_max, self.segment_size - record.BLANK_SIZE)

    def _record_max_of(self, shape: FrameShape) -> int:
        return self.segment_size - record.BLANK_SIZE if shape.copies else self._record_size_max

    def read_next_offsets(self) -> None:
        """Take the published next offsets of all queues as our own."""
        column = self._table.column(table_layout.NEXT_OFFSET)
        self._next_offsets[: len(column)] = column

    def store_timestamp(self, now_ms: int) -> int:
        """Store time for the next record: never below the last one."""
        return max(self.last_store_timestamp_ms, now_ms)

    def add(self, plan: AppendPlan, store_timestamp_ms: int) -> NDArray[np.uint8]:
        """Encode a frame behind what is staged; returns its answer columns, uint8[20 × count].

        Raises BadMessageError and its kin before anything is changed; on DiskFullError, StoreBusyError and OSError
        everything that is not published has been taken back, the frames added before this one too.
        """
        rendered = self._prepare(plan, store_timestamp_ms)
        self._check(plan)
        if plan.shape.copies:
            self._have_room_for(plan)
        batch_size = self._batch_size(plan) if plan.shape.batch else 0
        answer = np.empty(kernel.ANSWER_BYTES_PER_MESSAGE * plan.count, np.uint8)
        try:
            if self._end + batch_size + record.BLANK_SIZE > self._segment_end:
                self._end_segment()
            self._encode(plan, rendered, answer)
        except (MqprocError, OSError):
            self.take_back()
            raise
        self.last_store_timestamp_ms = store_timestamp_ms
        plan.rotation = self._cells[frame.ROTATION]
        self._touch(plan, answer)
        return answer

    def add_run(self, buffer: NDArray[np.uint8], store_timestamp_ms: int) -> int:
        """Encode frames of `buffer` uint8 behind what is staged: those that `known` was told of, as far as their shapes
        are known. Returns why it goes no further, see `kernels.append_run`.

        On DiskFullError, StoreBusyError and OSError everything that is not published has been taken back.
        """
        end = self._end
        try:
            reason = self._go_on(self._encode_run, buffer)
        except (MqprocError, OSError):
            self.take_back()
            raise
        if self._end != end:
            self.last_store_timestamp_ms = store_timestamp_ms
        return reason

    def add_alone(self, buffer: NDArray[np.uint8], at: int, store_timestamp_ms: int) -> bool:
        """Encode the whole frame at `at` of `buffer` uint8, write and publish it, while nothing else is to be.

        False, and nothing is done, when that is not all that it takes. Raises as `write_out`.
        """
        segment_end = self._segment_end
        start = segment_end - self.segment_size
        fd = self._fds.get(start)
        if fd is None:
            return False
        size = self._encode_alone(buffer, at, store_timestamp_ms, segment_end)
        if not size:
            return False
        io, end = self._io, self._end
        staged, place = self._staged_bytes[:size], end - start
        self._end = end + size
        self.last_store_timestamp_ms = store_timestamp_ms
        io.crash_point("append.reserved")
        io.crash_amid("append.half_written", fd, staged, place)
        try:
            io.pwrite(fd, staged, place)
        except OSError as error:
            self.take_back()
            raise as_refusal(error) from error
        self._file_end = self._end
        self.publish()
        return True

    def know(self, options: memoryview, shape: FrameShape, *, answered: bool) -> None:
        """Have `add_run` take frames of a shape, which was found by the options of one."""
        self.known.add(options, shape, self._rendered(shape), answered=answered)

    def check(self, plan: AppendPlan, store_timestamp_ms: int) -> None:
        """Raise what `add` would raise of a frame that is wrong; nothing is changed."""
        self._prepare(plan, store_timestamp_ms)
        self._check(plan)

    def write_out(self) -> None:
        """Give the staged bytes to the file. Raises DiskFullError and its kin; then nothing unpublished is left.

        The first write may have to wait for its segment: a log that was found to end with one may have no other.
        """
        try:
            self._write_staged_or_full()
        except MqprocError:
            self.take_back()
            raise

    def publish(self) -> None:
        """Make everything that was written out visible."""
        cells = self._cells
        self._io.crash_point("append.before_publish")
        cells[words_of.WRITTEN] = self._end
        cells[words_of.WRITTEN_STORE_TIMESTAMP_MS] = self.last_store_timestamp_ms
        self._io.crash_point("append.after_publish")
        self._publish_touched()
        cells[words_of.TABLE_AT] = self._end

    def sync(self) -> None:
        """Make everything that was written out durable. Raises FailedSyncError, which is final for the store."""
        synced = self._cells[words_of.WRITER_SYNCED]
        self._io.crash_point("flush.before_msync")
        for start in sorted(self._fds):
            if start + self.segment_size > synced:
                self._syncs.sync(self._fds[start])
        self._cells[words_of.WRITER_SYNCED] = self._end
        self._cells[words_of.WRITER_SYNCED_STORE_TIMESTAMP_MS] = self.last_store_timestamp_ms
        self._close_fds_below(self._segments.start_of(self._end))

    def take_back(self) -> None:
        """Forget everything that is not published and zero what was written of it.

        Raises TailNotClearedError and FailedSyncError.
        """
        written = self._cells[words_of.WRITTEN]
        self._staged = 0
        self._end = self._file_end = written
        self._segment_end = self._segments.start_of(written) + self.segment_size
        self.last_store_timestamp_ms = self._cells[words_of.WRITTEN_STORE_TIMESTAMP_MS]
        self.known.untouch()
        self.read_next_offsets()
        clear_unpublished(self._io, self._syncs, self._words, self._segments, self._fds)

    def close(self) -> None:
        self._close_fds_below(1 << 62)

    # Encoding

    def _prepare(self, plan: AppendPlan, store_timestamp_ms: int) -> RenderedShape:
        """Fill the kernel's state for a frame, in two goes: numpy's item by item would cost as much as the kernel."""
        rendered = self._rendered(plan.shape)
        frame.VARIABLES.pack_into(
            self._words.mapping,
            frame.VARIABLES_AT,
            plan.count,
            *plan.columns,
            len(plan.payload),
            plan.unique_counter,
            plan.rotation,
            store_timestamp_ms,
            plan.born_timestamp_ms,
            0,
        )
        self._constants[:] = rendered.constants
        return rendered

    def _rendered(self, shape: FrameShape) -> RenderedShape:
        rendered = shape.rendered
        if rendered is None or rendered.options is not self._options:
            rendered = shape.rendered = render(shape, self._options, self.store_host, self._record_max_of(shape))
        return rendered

    def _check(self, plan: AppendPlan) -> None:
        found = frame.check_frame(plan.payload, self._state)
        if found == frame.FRAME_OK:
            return
        message, value = self._cells[frame.FAILED_MESSAGE], self._cells[frame.FAILED_VALUE]
        if found == frame.BODY_TOO_LARGE:
            limit = self._options.max_message_size
            raise MessageTooLargeError(f"message {message}: body of {value:,} bytes; max_message_size is {limit:,}")
        if found == frame.PROPERTIES_TOO_LARGE:
            limit = record.PROPERTIES_SIZE_MAX
            raise PropertiesTooLargeError(f"message {message}: properties of {value:,} bytes; the limit is {limit:,}")
        if found == frame.RECORD_TOO_LARGE:
            limit = self._record_max_of(plan.shape)
            raise MessageTooLargeError(f"message {message}: record of {value:,} bytes; a segment takes {limit:,}")
        if found == frame.QUEUE_OUT_OF_RANGE:
            queues = len(plan.shape.queue_numbers)
            raise NoSuchQueueError(f"message {message}: queue id {value}; topic has {queues} queues")
        if found == frame.SEPARATOR_BYTE:
            name = (properties.KEYS, properties.TAGS, properties.SHARDING_KEY)[value]
            raise BadPropertyError(f"property {name}: a value has a separator byte (1 or 2)")
        raise BadMessageError("the frame's columns do not have the sizes that their lengths add up to")

    def _batch_size(self, plan: AppendPlan) -> int:
        """Bytes of a batch's records, which must lie together; checks it as a whole.

        As in RocketMQ a batch's bodies are together no larger than one body may be.
        """
        lengths_at = plan.columns[0]
        bodies = int(plan.payload[lengths_at : lengths_at + 4 * plan.count].view("<u4").sum())
        if bodies > self._options.max_message_size:
            limit = self._options.max_message_size
            raise MessageTooLargeError(f"batch with bodies of {bodies:,} bytes; max_message_size is {limit:,}")
        size = self._cells[frame.TOTAL_SIZE]
        if size + record.BLANK_SIZE > self.segment_size:
            raise MessageTooLargeError(f"batch of {size:,} bytes; a segment takes {self.segment_size:,}")
        return size

    def _encode(self, plan: AppendPlan, rendered: RenderedShape, answer: NDArray[np.uint8]) -> None:
        shape = np.frombuffer(bytearray().join((rendered.before_id, plan.unique_prefix, rendered.behind_id)), np.uint8)
        self._cells[frame.ANSWER_AT] = 0
        arrays = plan.payload, self._state, shape, plan.shape.queue_numbers, self._next_offsets, self._staging, answer
        self._go_on(kernel.encode_frame, *arrays)

    def _use_staging(self) -> None:
        """Give the kernels of known shapes what they work with."""
        known = self.known
        tables = known.run, self._state, known.table, known.key, known.queue_numbers, known.rounds
        given = *tables, self._next_offsets, known.touched, self._staging, known.answers
        self._encode_run: Callable[[NDArray[np.uint8]], int] = functools.partial(append_run, *given)
        self._encode_alone: Callable[[NDArray[np.uint8], int, int, int], int] = functools.partial(append_alone, *given)
        self._staged_bytes = self._staging.data

    def _go_on(self, encode: Callable[..., int], *given: NDArray[Any]) -> int:
        """Encode behind what is staged; write that, and end the segment, as often as it takes. Returns the reason why
        there is no more to encode now."""
        cells = self._cells
        while True:
            cells[frame.STAGING_AT] = self._staged
            cells[frame.PHYSICAL_AT] = self._end
            cells[frame.SEGMENT_END] = self._segment_end
            reason = encode(*given)
            self._staged = cells[frame.STAGING_AT]
            self._end = cells[frame.PHYSICAL_AT]
            if reason == kernel.SEGMENT_FULL:
                self._end_segment()
            elif reason == kernel.STAGING_FULL:
                self._write_staged_or_full()
            else:
                return reason

    def _end_segment(self) -> None:
        """Write what is staged and a BLANK, and go to the next segment."""
        segment_end = self._segment_end
        self._write_staged_or_full()
        blank = encode_blank(segment_end - self._end)
        fd = self._fd(segment_end - self.segment_size)
        self._io.crash_point("roll.blank")
        self._reserve(segment_end)
        try:
            self._io.pwrite(fd, blank, self._end % self.segment_size)
        except OSError as error:
            raise as_refusal(error) from error
        self._wait_for_segment(segment_end)
        self._end = self._file_end = segment_end
        self._segment_end += self.segment_size

    def _write_staged_or_full(self) -> None:
        try:
            self._write_staged()
        except OSError as error:
            raise as_refusal(error) from error

    def _write_staged(self) -> None:
        if self._staged == 0:
            return
        start = self._segment_end - self.segment_size
        # Before anything is reserved: without a descriptor that could not be taken back either.
        fd, staged, place = self._fd(start), self._staging.data[: self._staged], self._file_end - start
        self._reserve(self._file_end + self._staged)
        self._io.crash_point("append.reserved")
        self._io.crash_amid("append.half_written", fd, staged, place)
        self._io.pwrite(fd, staged, place)
        self._file_end += self._staged
        self._staged = 0

    def _reserve(self, end: int) -> None:
        if end > self._cells[words_of.RESERVED_END]:
            self._cells[words_of.RESERVED_END] = end

    def _fd(self, start: int) -> int:
        fd = self._fds.get(start)
        if fd is None:
            self._wait_for_segment(start)
            fd = self._io.open(self._segments.path(start), write=True)
            if not self._options.sync_flush:
                self._close_fds_below(start)
            self._fds[start] = fd
        return fd

    def _close_fds_below(self, start: int) -> None:
        for old in [old for old in self._fds if old < start]:
            self._io.close(self._fds.pop(old))

    def _touch(self, plan: AppendPlan, answer: NDArray[np.uint8]) -> None:
        numbers, fixed_queue = plan.shape.queue_numbers, plan.shape.fixed_queue
        if fixed_queue >= 0:
            numbers = numbers[fixed_queue : fixed_queue + 1]
        elif plan.count < len(numbers):
            numbers = numbers[answer[16 * plan.count :].view(np.int32)]
        self.known.touch(numbers)


def as_refusal(
    error: OSError, room_for: str = "the messages", failed: str = "the log could not be written"
) -> MqprocError:
    """What clients are told of an error of storage: what may pass by itself, a full disk, has a code of its own."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFullError(f"no room for {room_for}: {reason_of(error)}", hint_ms=1000)
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return StoreBusyError(f"out of resources: {error.strerror}", hint_ms=100)
    if error.errno == errno.EROFS:
        return StoreReadOnlyError(f"{failed}: {why_read_only(error.errno)}; run mqproc store repair")
    return InternalError(f"{failed}: {error.strerror or error}")
