"""Making ConsumeQueues agree with the log: what of them can be trusted, what is lost, what lies behind the end.

Up to a limit (the ConsumeQueue mark) units are durable, so there only a queue's last unit, its files' names and
lengths, and what the last run knew of it are looked at; a queue that lost units is rebuilt from the log. From the
limit on every unit is compared with the log by dispatch. Without a mark the limit is the log's beginning.

    look       every queue to the table, with its units below the limit; notes lost ones
    rebuild    lost queues, from their last unit that fits
    fill       fillers where the log has no record for a queue offset: holes, gaps
    clear      what lies behind each queue's end
    seal       the filler that a queue ends with, for RocketMQ
    remove     files without any unit, and topics of which nothing else is there
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels.fields import ABSENT, find_property, place_at, place_size, properties_at, properties_end
from mqproc.kernels.intrinsics import load_be32, load_be64
from mqproc.kernels.record_check import (
    record_size,
    signed_topic_length,
    topic_length_at,
    topic_length_size,
)
from mqproc.kernels.views import as_kernel_array
from mqproc.layout import queue_table as table_layout
from mqproc.layout import record
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.names import MULTI_DISPATCH_PREFIX
from mqproc.store.consume_queue import UNIT_SIZE, ConsumeQueueFiles, as_units, fillers
from mqproc.store.dispatcher import Gap
from mqproc.store.end_fillers import as_fillers, end_fillers
from mqproc.store.queue_extent import QueueExtent, filler_position
from mqproc.store.queue_hints import Hints, QueueHint
from mqproc.store.queue_table import QueueTable
from mqproc.store.recovery.store_files import QueueFiles
from mqproc.store.segments import LogSegments

Ranges = Sequence[tuple[int, int]]
# More missing offsets than this in a row are no loss but a number that is nonsense.
FILL_MAX: Final = 1 << 20
_MULTI_DISPATCH: Final = as_kernel_array(bytearray(b"INNER_MULTI_DISPATCH"))
# No log is as long as this: what points further is garbage.
LOG_BYTES_MAX: Final = 1 << 50


def is_nonsense(missing: int, log_bytes: int) -> bool:
    """Whether a lone record's queue offset cannot be: so many before it are missing, for which the log had no room."""
    return missing > FILL_MAX and missing * record.FIXED_SIZE_V4 > log_bytes


class QueueRecovery:
    """Recovery of one store's queues, whose files are `on_disk`, by a log that begins at `log_begin`."""

    def __init__(
        self,
        files: ConsumeQueueFiles,
        table: QueueTable,
        segments: LogSegments,
        on_disk: dict[tuple[str, int], QueueFiles],
        log_begin: int,
    ) -> None:
        self._files = files
        self._table = table
        self._segments = segments
        self._on_disk = on_disk
        self._log_begin = log_begin
        self.limit = log_begin
        self._set_back = False
        self.lost: dict[int, int] = {}
        """By queue number: log position from which on the queue must be built again."""
        self.changed = 0
        self._tops: dict[int, QueueHint] = {}
        # By queue number: where those end, and the record of their last unit, that lost their first file.
        self._floors: dict[int, tuple[int, int]] = {}
        # By queue number: where files without a unit begin, which matters only when the log has nothing of the queue.
        self._named: dict[int, int] = {}

    def look(self, limit: int, hints: Hints, *, set_back: bool = False) -> None:
        """Put every queue to the table as it is below `limit`; note which are lost there.

        `set_back`: units were durable above the limit, too, and damage has come since. Then what a queue lacks from its
        last unit on may be lost below the limit as well.
        """
        self.limit = limit
        self._set_back = set_back
        for (topic, queue_id), found in self._on_disk.items():
            self._look_at(topic, queue_id, found, hints.get((topic, queue_id)))
        for (topic, queue_id), hint in hints.items():
            if (topic, queue_id) not in self._on_disk and (set_back or hint.physical_end <= limit):
                number = self._table.create_queue(topic, queue_id)
                self._lose(number, self._log_begin, hint if hint.physical_end <= limit else None)

    def _look_at(self, topic: str, queue_id: int, found: QueueFiles, hint: QueueHint | None) -> None:
        known = hint if hint is not None and 0 < hint.physical_end <= self.limit else None
        extent = self._quick_extent(topic, queue_id, found, known)
        fits = extent is not None
        if extent is None:
            extent = self._files.extent_below(topic, queue_id, self.limit)
            fits = (
                not found.suspect
                and self._keeps(topic, queue_id, extent, known)
                and self._fits(topic, queue_id, extent)
            )
        if extent.max_offset == extent.first_offset > 0 and not extent.last_physical_end:
            number = self._table.create_queue(topic, queue_id)
            self._named[number] = extent.max_offset
        else:
            number = self._table.create_queue(topic, queue_id, extent.max_offset, extent.first_offset)
        self._table.store(number, table_layout.LAST_PHYSICAL_END, extent.last_physical_end)
        if hint is not None and hint.physical_end == extent.last_physical_end:
            self._table.store(number, table_layout.LAST_STORE_TIMESTAMP_MS, hint.store_timestamp_ms)
        if not fits:
            good = self._log_begin
            if number not in self._named:
                good = self._back_to_good(number, topic, queue_id, found, extent)
            self._lose(number, good, known)
        elif self._set_back and hint is not None and known is None and not self._goes_on(topic, queue_id, extent):
            self._lose(number, max(extent.last_physical_end, self._log_begin), None)
        if hint is not None and found.starts and hint.min_offset < min(found.starts[0] // UNIT_SIZE, hint.max_offset):
            # Its first file is gone, and retention would have moved the minimum before.
            if not topic.startswith(MULTI_DISPATCH_PREFIX):
                # Dispatch is to notice what records skip there: it would be left zeros.
                self._floors[number] = self._table.max_offset(number), self._table.last_physical_end(number)
                self._table.store(number, table_layout.MAX_OFFSET, 0)
                self._table.store(number, table_layout.LAST_PHYSICAL_END, 0)
            self._lose(number, self._log_begin, known)

    def _lose(self, number: int, position: int, hint: QueueHint | None) -> None:
        self.lost[number] = position
        if hint is not None:
            self._tops[number] = hint

    def _quick_extent(self, topic: str, queue_id: int, found: QueueFiles, hint: QueueHint | None) -> QueueExtent | None:
        """The extent when the files hold just what the last run knew of; None when they must be searched."""
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
        if len(units) > 1 and self._is_below_limit(units[1]):
            return None
        return QueueExtent(max(first, hint.min_offset), hint.max_offset, hint.physical_end)

    def _is_below_limit(self, unit: np.void) -> bool:
        return 0 <= int(unit["physical_offset"]) < self.limit and int(unit["size"]) > 0

    def _goes_on(self, topic: str, queue_id: int, extent: QueueExtent) -> bool:
        """Whether the unit behind those below the limit is there: then none of these is missing."""
        unit = self._unit(topic, queue_id, extent.max_offset)
        return unit is not None and int(unit["size"]) > 0

    def _keeps(self, topic: str, queue_id: int, extent: QueueExtent, hint: QueueHint | None) -> bool:
        """Whether the last unit that the last run knew of is still there."""
        if hint is None:
            return True
        if extent.max_offset < hint.max_offset:
            return False
        return self._files.last_end(topic, queue_id, hint.max_offset) == hint.physical_end

    def _fits(self, topic: str, queue_id: int, extent: QueueExtent) -> bool:
        """Whether the last unit points to the record that it should."""
        if extent.max_offset <= extent.first_offset:
            return True
        return self._unit_fits(topic, queue_id, extent.max_offset - 1)

    def _unit(self, topic: str, queue_id: int, queue_offset: int) -> np.void | None:
        try:
            found = as_units(self._files.read_units(topic, queue_id, queue_offset, 1))
        except FileNotFoundError:
            return None
        return found[0] if len(found) else None

    def _unit_fits(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """Whether a unit names the record of this queue offset; true for what cannot be told: fillers, deleted ones."""
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
        """Whether RocketMQ gives a topic units of a record that bears another (multi-dispatch). Its sizes hold."""
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
        """(size, topic, queue id, queue offset) of the record at an offset whose sizes hold; None without one."""
        base = self._segments.start_of(physical_offset)
        try:
            view = self._segments.view(base)
        except FileNotFoundError:
            return None
        at = physical_offset - base
        self._segments.touched(physical_offset)
        size = record_size(view, at, len(view))
        if size < 0 or load_be64(view, at + record.PHYSICAL_OFFSET) != physical_offset:
            return None
        width = topic_length_size(view, at)
        length_at = topic_length_at(view, at)
        topic = bytes(view[length_at + width : length_at + width + signed_topic_length(view, length_at, width)])
        queue_id, queue_offset = load_be32(view, at + record.QUEUE_ID), load_be64(view, at + record.QUEUE_OFFSET)
        return size, topic.decode(errors="replace"), queue_id, queue_offset

    def _back_to_good(self, number: int, topic: str, queue_id: int, found: QueueFiles, extent: QueueExtent) -> int:
        """Log position behind the last unit that can be believed; the table then ends with that unit."""
        end = self._first_bad(topic, queue_id, found, extent) if found.suspect else extent.max_offset
        step = 1
        while end > extent.first_offset and not self._unit_fits(topic, queue_id, end - 1):
            end = max(extent.first_offset, end - step)
            step *= 2
        physical_end = max(0, self._files.last_end(topic, queue_id, end))
        self._table.store(number, table_layout.MAX_OFFSET, end)
        self._table.store(number, table_layout.LAST_PHYSICAL_END, physical_end)
        return max(physical_end, self._log_begin)

    def _first_bad(self, topic: str, queue_id: int, found: QueueFiles, extent: QueueExtent) -> int:
        """The first queue offset whose unit cannot be: missing, no unit, or pointing before the one in front of it."""
        last = -1
        for start in found.starts:
            first = start // UNIT_SIZE
            if first > extent.first_offset and self._unit(topic, queue_id, first - 1) is None:
                return first - self._files.units_per_file
            units = as_units(self._files.read_units(topic, queue_id, first, self._files.units_per_file))
            # Fillers point nowhere: each stands where the unit before it does.
            real = units["size"] != FILLER_SIZE
            offsets = np.maximum.accumulate(np.where(real, units["physical_offset"].astype(np.int64), last))
            falls = real & (units["physical_offset"] < np.concatenate(([last], offsets[:-1])))
            bad = np.flatnonzero(falls | (units["size"] <= 0) | (offsets >= self.limit))
            if len(bad):
                return first + int(bad[0])
            last = int(offsets[-1])
        return extent.max_offset

    # After dispatch

    def top_up(self, holes: Ranges) -> int:
        """Fillers at the end of rebuilt queues whose last records the log does not hold any more; how many.

        A queue's offsets are never used again, though its records are gone.
        """
        for number, (end, physical_end) in self._floors.items():
            if self._table.max_offset(number) < end:
                # Units of what has expired: the log has no record as late as these.
                self._table.store(number, table_layout.MAX_OFFSET, end)
                self._table.store(number, table_layout.LAST_PHYSICAL_END, physical_end)
        count = 0
        for number, hint in self._tops.items():
            have = self._table.max_offset(number)
            plausible = hint.max_offset * record.FIXED_SIZE_V4 <= hint.physical_end
            if not plausible or not 0 < hint.max_offset - have <= FILL_MAX:
                continue
            if have == 0:
                # Nothing is left of it: only the last file is made, which keeps the queue's offset by its name.
                topic, queue_id = self._table.name(number)
                first = (hint.max_offset - 1) // self._files.units_per_file * self._files.units_per_file
                self._mend(number, topic, queue_id, first, self._fillers(hint.max_offset - first))
            else:
                end = self._table.last_physical_end(number)
                self._fill(Gap(number, have, hint.max_offset, end, hint.physical_end), holes, at_end=True)
            self._table.store(number, table_layout.MAX_OFFSET, hint.max_offset)
            count += hint.max_offset - have
        return count

    def keep_names(self, holes: Ranges) -> None:
        """A queue without a unit goes on where its files' names say, if the log has no record of it.

        Else the log is right: a power loss may take a file's name and leave the next one's, when the records that that
        was made for are gone too. Unless they are in a hole.
        """
        for number, named in self._named.items():
            have = self._table.max_offset(number)
            if have < named and (holes or have == 0):
                self._table.store(number, table_layout.MAX_OFFSET, named)
                self._table.store(number, table_layout.MIN_OFFSET, named)

    def not_believed(self, gaps: Iterable[Gap]) -> list[Gap]:
        """Gaps of too many offsets before a single record, more than the log ever had room for: its queue offset is
        nonsense, and its queue ends where it did before. With more records behind it, it is believed.

        What has been lost, and what has expired, did have room; `gaps` may have been filled since they were found.
        """
        found = []
        for gap in sorted(gaps, key=lambda gap: gap.stop, reverse=True):
            if gap.first == 0 or self._table.max_offset(gap.number) != gap.stop + 1:
                continue
            physical_end = self._files.last_end(*self._table.name(gap.number), gap.first)
            if not is_nonsense(gap.stop - gap.first, gap.physical_stop - physical_end):
                continue
            self._table.store(gap.number, table_layout.MAX_OFFSET, gap.first)
            self._table.store(gap.number, table_layout.LAST_PHYSICAL_END, physical_end)
            found.append(gap)
        return found

    def fill(self, gaps: Iterable[Gap], holes: Ranges, *, keep_units: bool = False) -> int:
        """Fillers for queue offsets that no record of the log has; how many units changed.

        They name the hole that lies there, if one does. With `keep_units` units that are there already stay, as far as
        they could be of records between the gap's ends.
        """
        return sum(self._fill(gap, holes, keep_units=keep_units) for gap in gaps if gap.stop - gap.first <= FILL_MAX)

    def _fill(self, gap: Gap, holes: Ranges, *, keep_units: bool = False, at_end: bool = False) -> int:
        topic, queue_id = self._table.name(gap.number)
        between = [start for start, _stop in holes if gap.physical_end <= start < gap.physical_stop]
        if gap.first == 0:
            # The queue begins inside a file, which has fillers of no place before its first unit.
            first, physical_offset = gap.stop - gap.stop % self._files.units_per_file, 0
        else:
            # Without a hole the records have expired, or never were.
            first, physical_offset = gap.first, self._filler_position(between[0] if between else gap.physical_end)
        if first == gap.stop:
            return 0
        if between or at_end or physical_offset + self._segments.segment_size < gap.physical_stop:
            wanted = self._fillers(gap.stop - first, physical_offset)
        else:
            # RocketMQ cuts a queue at a unit that points behind its log's end, and where no hole is it cuts no log.
            wanted = fillers(gap.stop - first, physical_offset)
        if keep_units:
            self._keep_units(topic, queue_id, first, gap, as_units(wanted))
        return self._mend(gap.number, topic, queue_id, first, wanted)

    def _fillers(self, count: int, place: int = 0) -> NDArray[np.uint8]:
        return end_fillers(count, place, self._segments.segment_size)

    def _filler_position(self, hole_start: int) -> int:
        return filler_position(hole_start, self._segments.segment_size)

    def _keep_units(self, topic: str, queue_id: int, first: int, gap: Gap, wanted: NDArray[np.void]) -> None:
        try:
            raw = self._files.raw_units(topic, queue_id, first, len(wanted))
        except FileNotFoundError:
            return
        there = as_units(as_fillers(raw))
        offsets, sizes = there["physical_offset"].astype(np.int64), there["size"].astype(np.int64)
        is_filler = sizes == FILLER_SIZE
        # A power loss may leave anything where a file begins; fillers point to the begin of something longer.
        is_record = (sizes >= record.FIXED_SIZE_V4) & (offsets + sizes <= gap.physical_stop)
        kept = (offsets >= gap.physical_end) & (offsets < gap.physical_stop) & (is_filler | is_record)
        wanted[: len(there)][kept] = as_units(raw)[kept]

    def fill_holes(self, holes: Iterable[tuple[int, int]]) -> int:
        """Fillers in place of the units that point into damaged ranges, also just behind a queue's end; how many."""
        ranges = sorted(holes)
        if not ranges:
            return 0
        return sum(
            self._fill_holes_of(number, topic, queue_id, ranges) for number, topic, queue_id in self._table.live()
        )

    def _fill_holes_of(self, number: int, topic: str, queue_id: int, ranges: Ranges) -> int:
        starts = self._files.starts(topic, queue_id)
        if not starts:
            return 0
        low, end = starts[0] // UNIT_SIZE, self._table.max_offset(number)
        filled = 0
        for hole_start, hole_stop in ranges:
            first = self._files.first_at_or_above(topic, queue_id, low, end, hole_start)
            stop = self._files.first_at_or_above(topic, queue_id, first, end, hole_stop)
            place = self._filler_position(hole_start)
            if stop == end:
                stop = self._behind_end(topic, queue_id, end, (hole_start, hole_stop), place)
            if stop > first:
                filled += self._mend(number, topic, queue_id, first, self._fillers(stop - first, place))
                if stop > end:
                    self._table.store(number, table_layout.MAX_OFFSET, stop)
                    end = stop
        if filled:
            # The next start looks for the last unit that is none of these.
            self._table.store(number, table_layout.LAST_PHYSICAL_END, self._files.last_end(topic, queue_id, end))
        return filled

    def _behind_end(self, topic: str, queue_id: int, end: int, hole: tuple[int, int], place: int) -> int:
        """How far units behind a queue's end point into a hole, or name it: their records were there before it was."""
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
        """Units behind a queue's end stay that only RocketMQ makes: of intact records of other topics which name it."""
        for number, topic, queue_id in self._table.live():
            end = self._table.max_offset(number)
            while (unit := self._unit(topic, queue_id, end)) is not None:
                physical_offset, size = int(unit["physical_offset"]), int(unit["size"])
                found = self._record_at(physical_offset) if size > 0 and physical_offset >= self._log_begin else None
                if found is None or found[0] != size or not self._is_dispatched_to(topic, physical_offset):
                    break
                end += 1
                self._table.store(number, table_layout.MAX_OFFSET, end)
                self._table.store(number, table_layout.LAST_PHYSICAL_END, physical_offset + size)

    def look_beyond(self) -> int:
        """Up to which log position units behind the queues' ends point: what the log has lost, if it was closed."""
        beyond = 0
        for number, topic, queue_id in self._table.live():
            unit = self._unit(topic, queue_id, self._table.max_offset(number))
            if unit is not None and int(unit["size"]) > 0 and 0 <= int(unit["physical_offset"]) < LOG_BYTES_MAX:
                end = self._files.extent(topic, queue_id).last_physical_end
                beyond = max(beyond, end if end < LOG_BYTES_MAX else 0)
        return beyond

    def clear(self, numbers: Iterable[int] | None = None) -> int:
        """Remove what lies behind the ends of these queues (None: of all); how many had anything there."""
        wanted = set(numbers) if numbers is not None else None
        cleared = 0
        for number, topic, queue_id in self._table.live():
            if wanted is None or number in wanted:
                cleared += self._files.clear_from(topic, queue_id, self._table.max_offset(number))
        self.changed += cleared
        return cleared

    def seal_ends(self) -> int:
        """Give queues that end with a filler one that RocketMQ goes on behind; how many had another (`end_fillers`)."""
        sealed = 0
        for number, topic, queue_id in self._table.live():
            last = self._table.max_offset(number) - 1
            unit = self._unit(topic, queue_id, last) if last >= 0 else None
            if unit is None or int(unit["size"]) != FILLER_SIZE:
                continue
            wanted = self._fillers(1, int(unit["physical_offset"]))
            if self._files.raw_units(topic, queue_id, last, 1) != wanted.tobytes():
                self._files.write_run(topic, queue_id, last, wanted, number)
                sealed += 1
        self.changed += sealed
        return sealed

    def remove_unused(self, topics: Iterable[str]) -> list[str]:
        """Remove the files of queues that have never had a record; the topics that go with theirs.

        A power loss may keep files, whose names any sync of the file system makes durable, and take both the records
        that they were made for and the line that their topic was made. `topics` are those of topics.json and its
        journal; others stay while any of their queues has had a record.
        """
        live = [
            (number, topic, queue_id, self._table.max_offset(number)) for number, topic, queue_id in self._table.live()
        ]
        known = {*topics, *(topic for _number, topic, _queue_id, end in live if end > 0)}
        unknown = set()
        for number, topic, queue_id, end in live:
            if end == 0 and (topic, queue_id) in self._on_disk and self._files.remove_unused(topic, queue_id):
                del self._on_disk[topic, queue_id]
            if topic not in known:
                self._table.delete_queue(number, 0)
                unknown.add(topic)
        return sorted(unknown)

    def _mend(self, number: int, topic: str, queue_id: int, first: int, units: NDArray[np.uint8]) -> int:
        changed = self._files.mend_run(topic, queue_id, first, units, generation=number)
        self.changed += changed
        return changed
