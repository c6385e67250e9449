"""Recovery of the ConsumeQueues: rebuilds, fills and cuts units to match the log.

Units below a limit (the ConsumeQueue mark) are durable. There only a queue's last unit, its file names and lengths, and
the last run's queue table are compared; a queue that lost units is rebuilt from the log. From the limit on, dispatch
compares every unit with the log. Without a mark the limit is the log's beginning.

    inspect    put every queue into the table with its units below the limit; find queues that lost units
    rebuild    lost queues, from their last valid unit
    fill       write fillers for queue offsets without a record: holes, gaps
    clear      remove units after each queue's end
    seal       correct the filler at a queue's end, for RocketMQ
    remove     files without any unit, and topics that exist nowhere else
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError, StartError
from mqproc.io.store_io import StoreIO
from mqproc.kernels.jit.intrinsics import load_be32, load_be64
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.kernels.record_check import VERIFY_ALL, checked_size, record_size, stored_at_ms, topic_of
from mqproc.kernels.record_fields import ABSENT, find_property, place_at, place_size, properties_at, properties_end
from mqproc.layout import queue_table as table_layout
from mqproc.layout import record
from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.bounds import QueueExtent, as_units, end_fillers, filler_position, normalize_fillers
from mqproc.store.consumequeue.files import filler_units, queues_on_disk
from mqproc.store.consumequeue.table import QueueSnapshot, QueueSnapshots
from mqproc.store.dispatch import QueueGap
from mqproc.store.lost_messages import LossSearch, LostMessages, merged_losses
from mqproc.store.recovery.log import LOG_BYTES_MAX, OpenStore, Resync
from mqproc.store.recovery.store_files import QueueFiles
from mqproc.topic_names import MULTI_DISPATCH_PREFIX
from mqproc.util.units import counted

Ranges = Sequence[tuple[int, int]]
# A longer run of missing offsets is not a loss but an invalid number.
FILL_MAX: Final = 1 << 20
_MULTI_DISPATCH: Final = as_kernel_array(bytearray(b"INNER_MULTI_DISPATCH"))
# Not allowed in a folder name: slash and NUL; "." and ".." are other folders.
_NO_FOLDER: Final = re.compile(rb"[/\x00]|\A\.\.?\Z")


def is_implausible(missing: int, log_bytes: int) -> bool:
    """Whether a single record's queue offset is implausible: the log had no room for the gap."""
    return missing > FILL_MAX and missing * record.FIXED_SIZE_V4 > log_bytes


def queue_of_record(view: NDArray[np.uint8], at: int) -> tuple[str, int] | None:
    """(topic, queue id) of the record at `at`, whose sizes are valid; None if they are invalid.

    The topic becomes a folder name: a record without a full CRC must not lead out of the store.
    """
    start, length = topic_of(view, at)
    name = bytes(view[start : start + length])
    queue_id = load_be32(view, at + record.QUEUE_ID)
    if not 0 < len(name) <= table_layout.TOPIC_BYTES_MAX or queue_id < 0 or _NO_FOLDER.search(name):
        return None
    try:
        return name.decode(), queue_id
    except UnicodeDecodeError:
        return None


def messages_after(segments: LogSegments, position: int) -> list[LostMessages]:
    """Messages of the intact records after a log position."""
    resync, limit = Resync(segments), segments.starts()[-1] + segments.segment_size
    found: list[LostMessages] = []
    while (following := resync.next_record(position, limit)) is not None:
        position = following
        base = segments.start_of(position)
        view = segments.view(base)
        while (size := int(checked_size(view, position - base, len(view), position, VERIFY_ALL))) > 0:
            at = position - base
            queue, queue_offset = queue_of_record(view, at), load_be64(view, at + record.QUEUE_OFFSET)
            if queue is not None and queue_offset >= 0:
                stored_ms = int(stored_at_ms(view, at, len(view), position))
                found.append(LostMessages(*queue, queue_offset, queue_offset + 1, stored_ms, stored_ms))
            position += size
    return merged_losses(found)


class QueueRecovery:
    """Recovers a store's queues from its log. `on_disk` are those that have files."""

    def __init__(self, store: OpenStore, on_disk: dict[tuple[str, int], QueueFiles]) -> None:
        self._files = store.queues
        self._table = store.table
        self._segments = store.segments
        self._on_disk = on_disk
        self.limit = self._log_begin = store.log.begin
        self._damaged_since = False
        self.lost: dict[int, int] = {}
        """Log position from which a queue must be rebuilt, by queue number."""
        self.changed = 0
        self._known_ends: dict[int, QueueSnapshot] = {}
        # Queues that lost their first file, by number: end and last physical end of the rest.
        self._lost_beginnings: dict[int, tuple[int, int]] = {}
        # Start of files without units, by queue number: used only if the log has no record of the queue.
        self._empty_starts: dict[int, int] = {}

    def inspect(self, limit: int, hints: QueueSnapshots, *, damaged_since: bool = False) -> None:
        """Put every queue as it is below `limit` into the table; find those that lost units.

        `damaged_since`: units above the limit were durable too, but damage has occurred since. Then missing units after
        a queue's last one may have been lost below the limit as well.
        """
        self.limit = limit
        self._damaged_since = damaged_since
        for (topic, queue_id), found in self._on_disk.items():
            self._inspect(topic, queue_id, found, hints.get((topic, queue_id)))
        for (topic, queue_id), hint in hints.items():
            if (topic, queue_id) not in self._on_disk and (damaged_since or hint.physical_end <= limit):
                number = self._table.create_queue(topic, queue_id)
                self._mark_lost(number, self._log_begin, hint if hint.physical_end <= limit else None)

    def _inspect(self, topic: str, queue_id: int, found: QueueFiles, hint: QueueSnapshot | None) -> None:
        known = hint if hint is not None and 0 < hint.physical_end <= self.limit else None
        extent = self._quick_extent(topic, queue_id, found, known)
        fits = extent is not None
        if extent is None:
            extent = self._files.extent_below(topic, queue_id, self.limit)
            fits = self._is_intact(topic, queue_id, found, extent, known)
        number = self._put_in_table(topic, queue_id, extent, hint)
        if not fits:
            good = self._log_begin
            if number not in self._empty_starts:
                good = self._rewind_to_valid(number, topic, queue_id, found, extent)
            self._mark_lost(number, good, known)
        elif self._damaged_since and hint and known is None:
            following = self._unit(topic, queue_id, extent.max_offset)
            # If the unit at the limit exists, no unit below it is missing.
            if following is None or int(following["size"]) <= 0:
                self._mark_lost(number, max(extent.last_physical_end, self._log_begin), None)
        if hint is not None and found.starts and hint.min_offset < min(found.starts[0] // UNIT_SIZE, hint.max_offset):
            # The first file is lost: retention would have raised the minimum before deleting it.
            if not topic.startswith(MULTI_DISPATCH_PREFIX):
                # Let dispatch find offsets that the records skip there; they would remain zeros.
                self._lost_beginnings[number] = self._table.max_offset(number), self._table.last_physical_end(number)
                self._end_at(number, 0, 0)
            self._mark_lost(number, self._log_begin, known)

    def _put_in_table(self, topic: str, queue_id: int, extent: QueueExtent, hint: QueueSnapshot | None) -> int:
        """Create the queue's entry; return its number."""
        if extent.max_offset == extent.first_offset > 0 and not extent.last_physical_end:
            number = self._table.create_queue(topic, queue_id)
            self._empty_starts[number] = extent.max_offset
        else:
            number = self._table.create_queue(topic, queue_id, extent.max_offset, extent.first_offset)
        self._table.store(number, table_layout.LAST_PHYSICAL_END, extent.last_physical_end)
        if hint is not None and hint.physical_end == extent.last_physical_end:
            self._table.store(number, table_layout.LAST_STORE_TIMESTAMP_MS, hint.store_timestamp_ms)
        return number

    def _end_at(self, number: int, end: int, physical_end: int) -> None:
        self._table.store(number, table_layout.MAX_OFFSET, end)
        self._table.store(number, table_layout.LAST_PHYSICAL_END, physical_end)

    def _mark_lost(self, number: int, position: int, hint: QueueSnapshot | None) -> None:
        self.lost[number] = position
        if hint is not None:
            self._known_ends[number] = hint

    def _quick_extent(
        self, topic: str, queue_id: int, found: QueueFiles, hint: QueueSnapshot | None
    ) -> QueueExtent | None:
        """Extent of a queue whose files match the last run's table; None if they must be searched."""
        if hint is None or found.suspect or not found.starts:
            return None
        first = found.starts[0] // UNIT_SIZE
        if not first < hint.max_offset <= first + len(found.starts) * self._files.units_per_file:
            return None
        units = as_units(self._files.read_units(topic, queue_id, hint.max_offset - 1, 2))
        last = units[0]
        if int(last["physical_offset"]) + int(last["size"]) != hint.physical_end and (
            int(last["size"]) != FILLER_SIZE
            or self._files.last_end(topic, queue_id, hint.max_offset) != hint.physical_end
        ):
            return None
        if len(units) > 1 and 0 <= int(units[1]["physical_offset"]) < self.limit and int(units[1]["size"]) > 0:
            return None
        return QueueExtent(max(first, hint.min_offset), hint.max_offset, hint.physical_end)

    def _is_intact(
        self, topic: str, queue_id: int, found: QueueFiles, extent: QueueExtent, known: QueueSnapshot | None
    ) -> bool:
        """Whether files and units are complete and the last unit points to its record."""
        if found.suspect or (known is not None and extent.max_offset < known.max_offset):
            return False
        if known is not None and self._files.last_end(topic, queue_id, known.max_offset) != known.physical_end:
            return False
        return extent.max_offset <= extent.first_offset or self._unit_matches(topic, queue_id, extent.max_offset - 1)

    def _unit(self, topic: str, queue_id: int, queue_offset: int) -> np.void | None:
        try:
            found = as_units(self._files.read_units(topic, queue_id, queue_offset, 1))
        except FileNotFoundError:
            return None
        return found[0] if len(found) else None

    def _unit_matches(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """Whether a unit points to its record; true for fillers and units of deleted records."""
        unit = self._unit(topic, queue_id, queue_offset)
        if unit is None:
            return False
        physical_offset, size = int(unit["physical_offset"]), int(unit["size"])
        if size == FILLER_SIZE or 0 <= physical_offset < self._log_begin:
            return True
        found = self._record_at(physical_offset)
        if found is None or found[0] != size:
            return False
        return found == (size, topic, queue_id, queue_offset) or self._is_dispatched_to(topic, physical_offset)

    def _is_dispatched_to(self, topic: str, physical_offset: int) -> bool:
        """Whether RocketMQ puts units of another topic's record into the topic (multi-dispatch)."""
        if topic.startswith(MULTI_DISPATCH_PREFIX):
            return True
        base = self._segments.start_of(physical_offset)
        view, at = self._segments.view(base), physical_offset - base
        end = properties_end(view, at, record_size(view, at, len(view)))
        place = find_property(view, properties_at(view, at), end, _MULTI_DISPATCH)
        if place == ABSENT:
            return False
        value = bytes(view[place_at(place) : place_at(place) + place_size(place)])
        return topic.encode() in value.split(b",")

    def _record_at(self, physical_offset: int) -> tuple[int, str, int, int] | None:
        """(size, topic, queue id, queue offset) of a record with valid sizes; None without one."""
        base = self._segments.start_of(physical_offset)
        try:
            view = self._segments.view(base)
        except FileNotFoundError:
            return None
        at = physical_offset - base
        self._segments.note_read(physical_offset)
        size = record_size(view, at, len(view))
        if size < 0 or load_be64(view, at + record.PHYSICAL_OFFSET) != physical_offset:
            return None
        start, length = topic_of(view, at)
        topic = bytes(view[start : start + length])
        queue_id, queue_offset = load_be32(view, at + record.QUEUE_ID), load_be64(view, at + record.QUEUE_OFFSET)
        return size, topic.decode(errors="replace"), queue_id, queue_offset

    def _rewind_to_valid(self, number: int, topic: str, queue_id: int, found: QueueFiles, extent: QueueExtent) -> int:
        """Cut the queue after its last valid unit; return the end of that unit's record."""
        end = self._first_invalid(topic, queue_id, found, extent) if found.suspect else extent.max_offset
        step = 1
        while end > extent.first_offset and not self._unit_matches(topic, queue_id, end - 1):
            end = max(extent.first_offset, end - step)
            step *= 2
        physical_end = max(0, self._files.last_end(topic, queue_id, end))
        self._end_at(number, end, physical_end)
        return max(physical_end, self._log_begin)

    def _first_invalid(self, topic: str, queue_id: int, found: QueueFiles, extent: QueueExtent) -> int:
        """First queue offset with an invalid unit: missing, malformed, or pointing backwards."""
        last = -1
        for start in found.starts:
            first = start // UNIT_SIZE
            if first > extent.first_offset and self._unit(topic, queue_id, first - 1) is None:
                return first - self._files.units_per_file
            units = as_units(self._files.read_units(topic, queue_id, first, self._files.units_per_file))
            # Fillers have no position of their own: they take that of the previous unit.
            real = units["size"] != FILLER_SIZE
            offsets = np.maximum.accumulate(np.where(real, units["physical_offset"].astype(np.int64), last))
            falls = real & (units["physical_offset"] < np.concatenate(([last], offsets[:-1])))
            bad = np.flatnonzero(falls | (units["size"] <= 0) | (offsets >= self.limit))
            if len(bad):
                return first + int(bad[0])
            last = int(offsets[-1])
        return extent.max_offset

    # After dispatch

    def top_up(self, holes: Ranges) -> None:
        """Append fillers to rebuilt queues for last records no longer in the log.

        Queue offsets are never reused, even if their records are gone.
        """
        for number, (end, physical_end) in self._lost_beginnings.items():
            if self._table.max_offset(number) < end:
                # Units of expired records: the log has no later records of the queue.
                self._end_at(number, end, physical_end)
        for number, hint in self._known_ends.items():
            have = self._table.max_offset(number)
            plausible = hint.max_offset * record.FIXED_SIZE_V4 <= hint.physical_end
            if not plausible or not 0 < hint.max_offset - have <= FILL_MAX:
                continue
            if have == 0:
                # Nothing is left of the queue: create only its last file, whose name preserves the queue offset.
                topic, queue_id = self._table.name(number)
                first = (hint.max_offset - 1) // self._files.units_per_file * self._files.units_per_file
                self._repair_units(number, topic, queue_id, first, self._fillers(hint.max_offset - first))
            else:
                end = self._table.last_physical_end(number)
                self._fill(QueueGap(number, have, hint.max_offset, end, hint.physical_end), holes, at_end=True)
            self._table.store(number, table_layout.MAX_OFFSET, hint.max_offset)

    def keep_empty_starts(self, holes: Ranges) -> None:
        """Continue queues without units where file names say, if the log has no record of them.

        With records, the log is right: a power loss may lose a file's name and keep the next one's, although the
        records in both are lost. Records in a hole may exist.
        """
        for number, named in self._empty_starts.items():
            have = self._table.max_offset(number)
            if have < named and (holes or have == 0):
                self._table.store(number, table_layout.MAX_OFFSET, named)
                self._table.store(number, table_layout.MIN_OFFSET, named)

    def implausible(self, gaps: Iterable[QueueGap]) -> list[QueueGap]:
        """Remove the last record's unit after gaps too long for the log; return these gaps.

        Such a record's queue offset is implausible, and its queue ends before the gap. With more records after it, it
        is trusted. Lost and expired records are no such gap; `gaps` may have been filled since they were found.
        """
        found = []
        for gap in sorted(gaps, key=lambda gap: gap.stop, reverse=True):
            if gap.first == 0 or self._table.max_offset(gap.number) != gap.stop + 1:
                continue
            physical_end = self._files.last_end(*self._table.name(gap.number), gap.first)
            if not is_implausible(gap.stop - gap.first, gap.physical_stop - physical_end):
                continue
            self._end_at(gap.number, gap.first, physical_end)
            found.append(gap)
        return found

    def fill(self, gaps: Iterable[QueueGap], holes: Ranges, *, keep_units: bool) -> None:
        """Write fillers for queue offsets without a record.

        They point to the hole in the gap, if any. With `keep_units`, existing units are kept if they may belong to
        records between the gap's ends.
        """
        for gap in gaps:
            if gap.stop - gap.first <= FILL_MAX:
                self._fill(gap, holes, keep_units=keep_units)

    def _fill(self, gap: QueueGap, holes: Ranges, *, keep_units: bool = False, at_end: bool = False) -> None:
        topic, queue_id = self._table.name(gap.number)
        between = [start for start, _stop in holes if gap.physical_end <= start < gap.physical_stop]
        if gap.first == 0:
            # The queue begins within a file: fillers before its first unit point nowhere.
            first, physical_offset = gap.stop - gap.stop % self._files.units_per_file, 0
        else:
            # Without a hole, the records have expired or never existed.
            hole_start = between[0] if between else gap.physical_end
            first, physical_offset = gap.first, filler_position(hole_start, self._segments.segment_size)
        if first == gap.stop:
            return
        if between or at_end or physical_offset + self._segments.segment_size < gap.physical_stop:
            units = self._fillers(gap.stop - first, physical_offset)
        else:
            # RocketMQ cuts a queue at a unit that points beyond the log, and without a hole it does not cut the log.
            units = filler_units(gap.stop - first, physical_offset)
        if keep_units:
            self._keep_units(topic, queue_id, first, gap, as_units(units))
        self._repair_units(gap.number, topic, queue_id, first, units)

    def _fillers(self, count: int, place: int = 0) -> NDArray[np.uint8]:
        return end_fillers(count, place, self._segments.segment_size)

    def _keep_units(self, topic: str, queue_id: int, first: int, gap: QueueGap, units: NDArray[np.void]) -> None:
        try:
            raw = self._files.raw_units(topic, queue_id, first, len(units))
        except FileNotFoundError:
            return
        present = as_units(normalize_fillers(raw))
        offsets, sizes = present["physical_offset"].astype(np.int64), present["size"].astype(np.int64)
        is_filler = sizes == FILLER_SIZE
        # After a power loss a file may begin with garbage; fillers point to the start of something longer.
        is_record = (sizes >= record.FIXED_SIZE_V4) & (offsets + sizes <= gap.physical_stop)
        kept = (offsets >= gap.physical_end) & (offsets < gap.physical_stop) & (is_filler | is_record)
        units[: len(present)][kept] = as_units(raw)[kept]

    def fill_holes(self, holes: Iterable[tuple[int, int]]) -> int:
        """Replace units that point into damaged ranges by fillers; return how many."""
        ranges = sorted(holes)
        return sum(self._fill_holes_of(*queue, ranges) for queue in self._table.live()) if ranges else 0

    def _fill_holes_of(self, number: int, topic: str, queue_id: int, ranges: Ranges) -> int:
        starts = self._files.starts(topic, queue_id)
        if not starts:
            return 0
        low, end = starts[0] // UNIT_SIZE, self._table.max_offset(number)
        filled = 0
        for hole_start, hole_stop in ranges:
            first = self._files.first_at_or_above(topic, queue_id, low, end, hole_start)
            stop = self._files.first_at_or_above(topic, queue_id, first, end, hole_stop)
            place = filler_position(hole_start, self._segments.segment_size)
            if stop == end:
                stop = self._end_in_hole(topic, queue_id, end, (hole_start, hole_stop), place)
            if stop > first:
                filled += self._repair_units(number, topic, queue_id, first, self._fillers(stop - first, place))
                if stop > end:
                    self._table.store(number, table_layout.MAX_OFFSET, stop)
                    end = stop
        if filled:
            # The next start looks for the last unit that is not a filler.
            self._table.store(number, table_layout.LAST_PHYSICAL_END, self._files.last_end(topic, queue_id, end))
        return filled

    def _end_in_hole(self, topic: str, queue_id: int, end: int, hole: tuple[int, int], place: int) -> int:
        """End of the units after a queue's end that point into a hole or are its fillers."""
        last, hole_stop = hole
        while (unit := self._unit(topic, queue_id, end)) is not None:
            physical_offset, size = int(unit["physical_offset"]), int(unit["size"])
            if size == FILLER_SIZE:
                if physical_offset != place:
                    break
            elif size <= 0 or not last <= physical_offset < hole_stop:
                break
            else:
                last = physical_offset
            end += 1
        return end

    def keep_multi_dispatched(self) -> None:
        """Keep units after a queue's end that only RocketMQ writes (multi-dispatch)."""
        for number, topic, queue_id in self._table.live():
            end = self._table.max_offset(number)
            while (unit := self._unit(topic, queue_id, end)) is not None:
                physical_offset, size = int(unit["physical_offset"]), int(unit["size"])
                found = self._record_at(physical_offset) if size > 0 and physical_offset >= self._log_begin else None
                if found is None or found[0] != size or not self._is_dispatched_to(topic, physical_offset):
                    break
                end += 1
                self._end_at(number, end, physical_offset + size)

    def scan_beyond_end(self) -> int:
        """Log position up to which units after the queues' ends point, a loss of a closed log."""
        beyond = 0
        for number, topic, queue_id in self._table.live():
            unit = self._unit(topic, queue_id, self._table.max_offset(number))
            if unit is not None and int(unit["size"]) > 0 and 0 <= int(unit["physical_offset"]) < LOG_BYTES_MAX:
                end = self._files.extent(topic, queue_id).last_physical_end
                beyond = max(beyond, end if end < LOG_BYTES_MAX else 0)
        return beyond

    def find_lost(self, holes: Ranges) -> list[LostMessages]:
        """Messages in damaged ranges, which fillers replace by now."""
        queues = [(topic, queue_id) for _number, topic, queue_id in self._table.live()]
        return LossSearch(self._files, self._segments).search(queues, holes)

    def find_cut(
        self, log_end: int, cut: Sequence[LostMessages], next_offsets: Mapping[tuple[str, int], int]
    ) -> list[LostMessages]:
        """Messages after the queues' ends: of `cut` records and units, and up to `next_offsets`."""
        ends = {(topic, queue_id): self._table.max_offset(number) for number, topic, queue_id in self._table.live()}
        beyond = [queue for queue, end in ends.items() if self._is_beyond(queue, end, log_end)]
        search = LossSearch(self._files, self._segments)
        found = search.search(beyond, [(log_end, LOG_BYTES_MAX)])
        for queue, stop in next_offsets.items():
            if queue in ends and 0 < stop - ends[queue] <= FILL_MAX:
                found.append(LostMessages(*queue, ends[queue], stop, search.time_of_unit(queue, ends[queue] - 1)))
        for each in cut:
            first = max(each.first, ends.get((each.topic, each.queue_id), 0))
            if first < each.stop:
                found.append(replace(each, first=first))
        return merged_losses(found)

    def _is_beyond(self, queue: tuple[str, int], queue_offset: int, log_end: int) -> bool:
        unit = self._unit(*queue, queue_offset)
        return unit is not None and int(unit["size"]) > 0 and log_end <= int(unit["physical_offset"]) < LOG_BYTES_MAX

    def clear(self, numbers: Iterable[int] | None = None) -> int:
        """Remove units after the ends of these queues (None: all); return how many queues had any."""
        chosen = set(numbers) if numbers is not None else None
        cleared = 0
        for number, topic, queue_id in self._table.live():
            if chosen is None or number in chosen:
                cleared += self._files.clear_from(topic, queue_id, self._table.max_offset(number))
        self.changed += cleared
        return cleared

    def seal_ends(self) -> int:
        """Make fillers at the queues' ends such that RocketMQ continues there; return how many."""
        sealed = 0
        for number, topic, queue_id in self._table.live():
            last = self._table.max_offset(number) - 1
            unit = self._unit(topic, queue_id, last) if last >= 0 else None
            if unit is None or int(unit["size"]) != FILLER_SIZE:
                continue
            expected = self._fillers(1, int(unit["physical_offset"]))
            if self._files.raw_units(topic, queue_id, last, 1) != expected.tobytes():
                self._files.write_run(topic, queue_id, last, expected, number)
                sealed += 1
        self.changed += sealed
        return sealed

    def remove_unused(self, topics: Iterable[str]) -> list[str]:
        """Remove the files of queues that never had a record; return the topics removed with them.

        A power loss may keep files, whose names any sync of the file system makes durable, but lose the records for
        which they were created and the journal line of their topic. `topics` are those of topics.json and its journal;
        other topics stay while any of their queues has had a record.
        """
        live = list(self._table.live())
        known = {*topics, *(topic for number, topic, _queue_id in live if self._table.max_offset(number) > 0)}
        unknown = set()
        for number, topic, queue_id in live:
            unused = self._table.max_offset(number) == 0
            if unused and (topic, queue_id) in self._on_disk and self._files.remove_unused(topic, queue_id):
                del self._on_disk[topic, queue_id]
            if topic not in known:
                self._table.delete_queue(number, 0)
                unknown.add(topic)
        return sorted(unknown)

    def _repair_units(self, number: int, topic: str, queue_id: int, first: int, units: NDArray[np.uint8]) -> int:
        changed = self._files.repair_run(topic, queue_id, first, units, generation=number)
        self.changed += changed
        return changed


# RocketMQ's queue types. A topic's attribute names its type; each type has a folder of its own.
#
#     config/topics.json   "queue.type": "BatchCQ", "SimpleCQ" or missing
#     consumequeue/        SimpleCQ: one unit for each record                          supported
#     batchconsumequeue/   BatchCQ: one unit for a record of several messages          rejected, not modified
#
# RocketMQ does not start if attribute and folder contradict each other. Dispatching records of a batch topic into
# `consumequeue` would cause that, so this is checked before anything is changed.


SIMPLE: Final = "SimpleCQ"
BATCH: Final = "BatchCQ"
ATTRIBUTE: Final = "queue.type"
BATCH_FOLDER: Final = "batchconsumequeue"


def check_queue_types(io: StoreIO, paths: StorePaths) -> None:
    """Check every topic's attribute and folders. Changes nothing.

    Raises CorruptStoreError if they contradict each other, StartError for batch queues, which are not supported.
    """
    kinds = _queue_types(io, paths)
    for folder, actual in ((paths.consume_queue, SIMPLE), (paths.root / BATCH_FOLDER, BATCH)):
        for topic in sorted({topic for topic, _queue_id in queues_on_disk(io, folder)[0]}):
            expected = kinds.get(topic, SIMPLE)
            if expected != actual:
                place = folder / topic
                raise CorruptStoreError(f"{place}: queues of topic {topic!r} should be {expected}, but is {actual}")
    batch = sorted(topic for topic, kind in kinds.items() if kind == BATCH)
    if batch:
        raise StartError(
            f"{paths.topics}: topic {batch[0]!r} has {ATTRIBUTE} = {BATCH}, which mqproc does not have; "
            f"{counted(len(batch), 'such topic')}, nothing was changed"
        )


def _queue_types(io: StoreIO, paths: StorePaths) -> dict[str, str]:
    """Queue types in topics.json; empty if it is unreadable."""
    try:
        value, _remark = rocketmq_json.load(io, paths.topics)
    except (CorruptStoreError, IsADirectoryError):
        return {}
    table = value.get("topicConfigTable") if isinstance(value, dict) else None
    kinds = {}
    for topic, config in table.items() if isinstance(table, dict) else ():
        attributes = config.get("attributes") if isinstance(config, dict) else None
        if isinstance(attributes, dict) and ATTRIBUTE in attributes:
            kinds[str(topic)] = str(attributes[ATTRIBUTE])
    return kinds
