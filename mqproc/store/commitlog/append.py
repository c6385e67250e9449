"""Append to the CommitLog: the writer's part of the engine.

The kernel encodes frames into a staging buffer, which is written with `pwrite` when it is full, at the end of a segment
and in `write_out`. Nothing is visible before `publish`, which stores the shared words in this order: `written`, the
`next_offset` of the touched queues, `table_at`. The kernel counts messages; `roll_back` subtracts unpublished messages.
`reserved_end` is stored before the bytes are written, so that a successor knows which bytes after `written` to zero.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mqproc.config.options import Options
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
from mqproc.io.store_io import reason_of
from mqproc.ipc.control_words import Words, why_read_only
from mqproc.kernels import append_frame as frame
from mqproc.kernels.append_run import DISPATCH_LAG_MAX, append_run, append_single, publish_touched
from mqproc.layout import control, properties, record
from mqproc.layout import queue_table as table_layout
from mqproc.layout.record_codec import encode_blank
from mqproc.store.commitlog.append_templates import (
    AppendPlan,
    AppendTemplate,
    AppendTemplates,
    RenderedTemplate,
    render,
)
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.commitlog.takeover import clear_unpublished
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.sync_guard import Syncing

STAGING_BYTES_MIN = 1 << 20


class CommitLogAppender:
    """The append position of the log. Exactly one exists, in the writer process.

    `wait_for_segment(start)` is called when the segment at `start` does not exist yet. It returns once it does, or
    raises DiskFullError or StoreBusyError.
    """

    def __init__(
        self,
        syncs: Syncing,
        options: Options,
        words: Words,
        table: QueueTable,
        segments: LogSegments,
        store_host: bytes,
        wait_for_segment: Callable[[int], None],
        templates: AppendTemplates | None = None,
    ) -> None:
        """Start at the published end of the log."""
        self._io = segments.io
        self._syncs = syncs
        self._options = options
        self._words = words
        self._cells = words.cells
        self._table = table
        self._segments = segments
        self.store_host = store_host
        self._wait_for_segment = wait_for_segment
        self.segment_size = segments.segment_size
        self._record_size_max = self._record_size_limit(options.max_message_size)
        self._staging = np.zeros(max(STAGING_BYTES_MIN, self._record_size_max), np.uint8)
        self._state = np.frombuffer(words.mapping, np.int64)
        self._constants = memoryview(words.mapping)[frame.CONSTANTS_AT : frame.CONSTANTS_AT + frame.CONSTANTS.size]
        self._next_offsets = np.zeros(table.capacity, np.int64)
        self.templates = templates or AppendTemplates(table.capacity)
        self.templates.words[DISPATCH_LAG_MAX] = options.max_dispatch_behind_bytes
        self._use_staging()
        self._publish_touched = functools.partial(
            publish_touched, table.cells, self.templates.run, self._next_offsets, self.templates.touched
        )
        self._staged = 0
        self._end = self._file_end = words[control.WRITTEN]
        self._segment_end = segments.start_of(self._end) + segments.segment_size
        self._fds: dict[int, int] = {}
        self.last_store_timestamp_ms = words[control.WRITTEN_STORE_TIMESTAMP_MS]
        self.read_next_offsets()

    @property
    def end(self) -> int:
        """Position after the last encoded record, published or not."""
        return self._end

    @property
    def staged_bytes(self) -> int:
        """Encoded bytes that are not written to the file yet."""
        return self._staged

    def lost_segment(self) -> Path | None:
        """The current segment's path if it does not lead to the open file any more; else None."""
        start = self._segment_end - self.segment_size
        fd, path = self._fds.get(start), self._segments.path(start)
        return None if fd is None or self._io.leads_to(path, fd) else path

    def set_options(self, options: Options) -> None:
        """Apply a changed `max_message_size`."""
        self._options = options
        self.templates.clear()
        self.templates.words[DISPATCH_LAG_MAX] = options.max_dispatch_behind_bytes
        self._record_size_max = self._record_size_limit(options.max_message_size)
        self._ensure_staging(self._record_size_max)

    def _ensure_staging(self, size: int) -> None:
        """Enlarge the staging buffer to hold a record of `size` bytes."""
        if len(self._staging) < size:
            self.write_out()
            self._staging = np.zeros(size, np.uint8)
            self._use_staging()

    def _record_size_limit(self, bodies_max: int) -> int:
        """Size limit of a record with this limit of its body: RocketMQ's limit, or the segment."""
        return min(bodies_max + record.RECORD_OVERHEAD_MAX, self.segment_size - record.BLANK_SIZE)

    def _record_max_of(self, template: AppendTemplate) -> int:
        return self.segment_size - record.BLANK_SIZE if template.copies else self._record_size_max

    def read_next_offsets(self) -> None:
        """Copy the published next offsets of all queues."""
        column = self._table.column(table_layout.NEXT_OFFSET)
        self._next_offsets[: len(column)] = column

    def store_timestamp(self, now_ms: int) -> int:
        """Store timestamp of the next record, never below the last record's."""
        return max(self.last_store_timestamp_ms, now_ms)

    def add(self, plan: AppendPlan, store_timestamp_ms: int) -> NDArray[np.uint8]:
        """Encode a frame into the staging buffer; returns its answer columns, uint8[20 × count].

        Raises BadMessageError and related errors before any change. On DiskFullError, StoreBusyError and OSError
        everything unpublished is rolled back, including frames that were added before this one.
        """
        rendered = self._prepare(plan, store_timestamp_ms)
        self._check(plan)
        if plan.template.copies:
            # A copied message may exceed the current `max_message_size`.
            self._ensure_staging(self._record_size_limit(len(plan.payload)))
        batch_size = self._batch_size(plan) if plan.template.batch else 0
        answer = np.empty(frame.ANSWER_BYTES_PER_MESSAGE * plan.count, np.uint8)
        try:
            if self._end + batch_size + record.BLANK_SIZE > self._segment_end:
                self._end_segment()
            self._encode(plan, rendered, answer)
        except (MqprocError, OSError):
            self.roll_back()
            raise
        self.last_store_timestamp_ms = store_timestamp_ms
        plan.rotation = self._cells[frame.ROTATION]
        self._touch(plan, answer)
        return answer

    def add_run(self, buffer: NDArray[np.uint8], store_timestamp_ms: int) -> int:
        """Encode the frames of the current run in `buffer` uint8 while their templates are known.

        Returns the stop reason, see `kernels.append_run`. On DiskFullError, StoreBusyError and OSError everything
        unpublished is rolled back.
        """
        end = self._end
        try:
            reason = self._encode_all(self._encode_run, buffer)
        except (MqprocError, OSError):
            self.roll_back()
            raise
        if self._end != end:
            self.last_store_timestamp_ms = store_timestamp_ms
        return reason

    def add_single(self, buffer: NDArray[np.uint8], at: int, store_timestamp_ms: int) -> bool:
        """Encode, write and publish the single frame at `at` of `buffer` uint8; nothing is staged.

        Returns False without a change if more is needed, such as a new segment. Raises as `write_out`.
        """
        segment_end = self._segment_end
        start = segment_end - self.segment_size
        fd = self._fds.get(start)
        if fd is None:
            return False
        size = self._encode_single(buffer, at, store_timestamp_ms, segment_end)
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
            self.roll_back()
            raise append_error(error) from error
        self._file_end = self._end
        self.publish()
        return True

    def add_template(self, options: memoryview, template: AppendTemplate, *, answered: bool) -> None:
        """Let `add_run` encode frames with these request options by a template."""
        self.templates.add(options, template, self._render(template), answered=answered)

    def check(self, plan: AppendPlan, store_timestamp_ms: int) -> None:
        """Raise the error that `add` would raise for an invalid frame; changes nothing."""
        self._prepare(plan, store_timestamp_ms)
        self._check(plan)

    def write_out(self) -> None:
        """Write the staged bytes. Raises DiskFullError and similar after a rollback.

        The first write may wait for its segment: recovery may have found a log that ends at a segment border.
        """
        try:
            self._write_staged()
        except MqprocError:
            self.roll_back()
            raise

    def publish(self) -> None:
        """Make everything that has been written visible to readers."""
        cells = self._cells
        self._io.crash_point("append.before_publish")
        cells[control.WRITTEN] = self._end
        cells[control.WRITTEN_STORE_TIMESTAMP_MS] = self.last_store_timestamp_ms
        self._io.crash_point("append.after_publish")
        self._publish_touched()
        cells[control.TABLE_AT] = self._end

    def sync(self) -> None:
        """Make everything written durable. Raises FailedSyncError, which is final for the store."""
        synced = self._cells[control.WRITER_SYNCED]
        self._io.crash_point("flush.before_msync")
        for start in sorted(self._fds):
            if start + self.segment_size > synced:
                self._syncs.sync(self._fds[start])
        self._cells[control.WRITER_SYNCED] = self._end
        self._cells[control.WRITER_SYNCED_STORE_TIMESTAMP_MS] = self.last_store_timestamp_ms
        self._close_fds_below(self._segments.start_of(self._end))

    def roll_back(self) -> None:
        """Discard everything unpublished, and zero the written part of it.

        Raises TailNotClearedError and FailedSyncError.
        """
        written = self._cells[control.WRITTEN]
        self._staged = 0
        self._end = self._file_end = written
        self._segment_end = self._segments.start_of(written) + self.segment_size
        self.last_store_timestamp_ms = self._cells[control.WRITTEN_STORE_TIMESTAMP_MS]
        self.templates.clear_touched()
        self.read_next_offsets()
        clear_unpublished(self._io, self._syncs, self._words, self._segments, self._fds)

    def close(self) -> None:
        self._close_fds_below(1 << 62)

    # Encoding

    def _prepare(self, plan: AppendPlan, store_timestamp_ms: int) -> RenderedTemplate:
        """Fill the kernel's state with two bulk writes, since numpy's item access costs too much."""
        rendered = self._render(plan.template)
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

    def _render(self, template: AppendTemplate) -> RenderedTemplate:
        rendered = template.rendered
        if rendered is None or rendered.options is not self._options:
            rendered = template.rendered = render(
                template, self._options, self.store_host, self._record_max_of(template)
            )
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
            limit = self._record_max_of(plan.template)
            raise MessageTooLargeError(f"message {message}: record of {value:,} bytes; a segment takes {limit:,}")
        if found == frame.QUEUE_OUT_OF_RANGE:
            queues = len(plan.template.queue_numbers)
            raise NoSuchQueueError(f"message {message}: queue id {value}; topic has {queues} queues")
        if found == frame.SEPARATOR_BYTE:
            name = (properties.KEYS, properties.TAGS, properties.SHARDING_KEY)[value]
            raise BadPropertyError(f"property {name}: a value has a separator byte (1 or 2)")
        raise BadMessageError("the frame's columns do not have the sizes that their lengths add up to")

    def _batch_size(self, plan: AppendPlan) -> int:
        """Check a batch as a whole; returns the size of its records, which must be contiguous.

        As in RocketMQ, the bodies of a batch together may not exceed `max_message_size`.
        """
        lengths_at = plan.columns[0]
        bodies = int(plan.payload[lengths_at : lengths_at + 4 * plan.count].view("<u4").sum())
        limit = self._options.max_message_size
        if bodies > limit:
            raise MessageTooLargeError(f"batch with bodies of {bodies:,} bytes; max_message_size is {limit:,}")
        size = self._cells[frame.TOTAL_SIZE]
        if size + record.BLANK_SIZE > self.segment_size:
            raise MessageTooLargeError(f"batch of {size:,} bytes; a segment takes {self.segment_size:,}")
        return size

    def _encode(self, plan: AppendPlan, rendered: RenderedTemplate, answer: NDArray[np.uint8]) -> None:
        texts = np.frombuffer(bytearray().join((rendered.before_id, plan.unique_prefix, rendered.after_id)), np.uint8)
        self._cells[frame.ANSWER_AT] = 0
        numbers, offsets = plan.template.queue_numbers, self._next_offsets
        arrays = plan.payload, self._state, texts, numbers, offsets, self._staging, answer
        self._encode_all(frame.encode_frame, *arrays)

    def _use_staging(self) -> None:
        """Bind the kernels to the current staging buffer."""
        templates = self.templates
        tables = templates.run, self._state, templates.table, templates.key, templates.queue_numbers, templates.rounds
        arguments = *tables, self._next_offsets, templates.touched, self._staging, templates.answers
        self._encode_run: Callable[[NDArray[np.uint8]], int] = functools.partial(append_run, *arguments)
        encode_single: Callable[[NDArray[np.uint8], int, int, int], int] = functools.partial(append_single, *arguments)
        self._encode_single = encode_single
        self._staged_bytes = self._staging.data

    def _encode_all(self, encode: Callable[..., int], *arguments: NDArray[Any]) -> int:
        """Run an encoding kernel, writing the staging buffer and ending segments as needed.

        Returns the reason why it stopped.
        """
        cells = self._cells
        while True:
            cells[frame.STAGING_AT] = self._staged
            cells[frame.PHYSICAL_AT] = self._end
            cells[frame.SEGMENT_END] = self._segment_end
            reason = encode(*arguments)
            self._staged = cells[frame.STAGING_AT]
            self._end = cells[frame.PHYSICAL_AT]
            if reason == frame.SEGMENT_FULL:
                self._end_segment()
            elif reason == frame.STAGING_FULL:
                self._write_staged()
            else:
                return reason

    def _end_segment(self) -> None:
        """Write the staged bytes and a BLANK, and advance to the next segment."""
        segment_end = self._segment_end
        self._write_staged()
        blank = encode_blank(segment_end - self._end)
        fd = self._fd(segment_end - self.segment_size)
        self._io.crash_point("roll.blank")
        self._reserve(segment_end)
        try:
            self._io.pwrite(fd, blank, self._end % self.segment_size)
        except OSError as error:
            raise append_error(error) from error
        self._wait_for_segment(segment_end)
        self._end = self._file_end = segment_end
        self._segment_end += self.segment_size

    def _write_staged(self) -> None:
        if self._staged == 0:
            return
        start = self._segment_end - self.segment_size
        try:
            # Open before reserving: if opening failed afterwards, the reserved range could not be zeroed.
            fd, staged, place = self._fd(start), self._staging.data[: self._staged], self._file_end - start
            self._reserve(self._file_end + self._staged)
            self._io.crash_point("append.reserved")
            self._io.crash_amid("append.half_written", fd, staged, place)
            self._io.pwrite(fd, staged, place)
        except OSError as error:
            raise append_error(error) from error
        self._file_end += self._staged
        self._staged = 0

    def _reserve(self, end: int) -> None:
        if end > self._cells[control.RESERVED_END]:
            self._cells[control.RESERVED_END] = end

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
        numbers, fixed_queue = plan.template.queue_numbers, plan.template.fixed_queue
        if fixed_queue >= 0:
            numbers = numbers[fixed_queue : fixed_queue + 1]
        elif plan.count < len(numbers):
            numbers = numbers[answer[16 * plan.count :].view(np.int32)]
        self.templates.touch(numbers)


def append_error(
    error: OSError, room_for: str = "the messages", failed: str = "the log could not be written"
) -> MqprocError:
    """Error for clients after a storage error; transient errors have their own codes."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFullError(f"no room for {room_for}: {reason_of(error)}", hint_ms=1000)
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return StoreBusyError(f"out of resources: {error.strerror}", hint_ms=100)
    if error.errno == errno.EROFS:
        return StoreReadOnlyError(f"{failed}: {why_read_only(error.errno)}; run mqproc store repair")
    return InternalError(f"{failed}: {error.strerror or error}")
