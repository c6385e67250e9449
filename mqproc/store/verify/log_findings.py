"""From shares to the whole log: where one share ends the next must begin; what lies between is damage, or the end."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from mqproc.config import PAGE_BYTES
from mqproc.io import StoreIO
from mqproc.kernels import record_check
from mqproc.store.clearing import dirty_end
from mqproc.store.damage import merged
from mqproc.store.verify.findings import Finding, Kind
from mqproc.store.verify.inventory import MISSING_ALONE_MAX, Inventory
from mqproc.store.verify.log_pass import BAD_QUEUE, MISSING, Fault, LogShare, reason_at
from mqproc.store.verify.log_views import LogViews
from mqproc.store.verify.picture import Picture, Share

_KINDS: Final = {
    record_check.ZERO: Kind.RECORD_ZEROS,
    record_check.BAD_MAGIC: Kind.RECORD_MAGIC,
    record_check.BAD_SIZE: Kind.RECORD_SIZE,
    record_check.BAD_OFFSET: Kind.RECORD_OFFSET,
    record_check.BAD_BODY_CRC: Kind.RECORD_BODY_CRC,
    record_check.BAD_PROPERTY_CRC: Kind.RECORD_CRC,
    BAD_QUEUE: Kind.RECORD_QUEUE,
    MISSING: Kind.SEGMENT_MISSING,
}
_UNKNOWN: Final = 0
# Zeros at the end of a page: so many are no coincidence.
_PAGE_TAIL_BYTES: Final = 16


@dataclass(slots=True)
class WholeLog:
    """The log as its shares tell it together: records of [begin, end), `faults` in between, findings."""

    begin: int
    end: int = 0
    records: int = 0
    entries: int = 0
    last_store_timestamp_ms: int = 0
    max_store_timestamp_ms: int = 0
    faults: list[Fault] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unwritten: set[int] = field(default_factory=set)
    """Where faults begin that have pages which end in zeros: a crash or a copy lacks what was stored there."""
    ends_with_loss: bool = False
    """Recovery has let the log go on behind segments that were lost, and nothing has been appended since."""

    @property
    def fault_ranges(self) -> list[tuple[int, int]]:
        """[start, stop) of damage, ascending, neighbours as one."""
        return merged((fault.start, fault.stop) for fault in self.faults)


def join_shares(
    io: StoreIO,
    picture: Picture,
    shares: list[LogShare],
    again: Callable[[Share], LogShare],
    known_holes: list[tuple[int, int]],
) -> WholeLog:
    """Put shares together, in their order. `again` walks one that must begin elsewhere; it takes its place."""
    log = WholeLog(picture.positions.begin)
    views = LogViews(io, picture.inventory)
    cursor = log.end = picture.shares[0].start if picture.shares else picture.positions.begin
    faults: list[Fault] = []
    for index, found in enumerate(shares):
        if found.begin is not None and found.begin < cursor:
            # Something like a record within a record.
            stop = found.share.stop
            found = shares[index] = again(Share(found.share.number, cursor, stop, True, found.share.compared))
        begin = found.share.stop if found.begin is None else found.begin
        if begin > cursor:
            faults.append(Fault(cursor, begin, _UNKNOWN))
        faults += found.faults
        cursor = max(cursor, found.end)
        _add(log, found)
        for position in found.wrong_blanks:
            log.findings.append(_finding(picture, Kind.BLANK_SIZE, position, 8))
    whole = _whole_faults(picture, views, faults, log.end)
    _go_on_behind_known_loss(picture, log, known_holes)
    if log.ends_with_loss:
        whole = [fault for fault in whole if fault.start < cursor]
        whole.append(Fault(cursor, log.end, MISSING))
    log.faults = [fault for fault in whole if log.begin <= fault.start < log.end]
    log.unwritten = {fault.start for fault in log.faults if _has_unwritten_page(views, fault)}
    log.findings += _of_faults(picture, log.faults, known_holes)
    if picture.positions.end is None and not picture.positions.running:
        tail = next((fault for fault in whole if fault.start >= log.end), None)
        log.findings += _of_tail(io, picture, log.end, tail)
    views.close()
    return log


def _go_on_behind_known_loss(picture: Picture, log: WholeLog, known: list[tuple[int, int]]) -> None:
    """The log's end when its last records are known to be lost: then it goes on in the segment behind them."""
    for start, stop in merged(known):
        if start <= log.end < stop and stop in picture.inventory.segments:
            log.end = stop
            log.ends_with_loss = True


def _add(log: WholeLog, found: LogShare) -> None:
    log.records += found.records
    log.entries += found.entries
    if found.records_end is not None:
        log.end = max(log.end, found.records_end)
    if found.records:
        log.last_store_timestamp_ms = found.last_store_timestamp_ms
        log.max_store_timestamp_ms = max(log.max_store_timestamp_ms, found.max_store_timestamp_ms)


def _whole_faults(picture: Picture, views: LogViews, faults: Iterable[Fault], end: int) -> list[Fault]:
    """Faults with those that a share's border cut put together, each with its reason.

    None reaches over a segment's border, nor over the log's `end`: the last record may be of a queue that cannot be.
    """
    joined: list[Fault] = []
    for fault in faults:
        for part in _by_segment(fault, picture.inventory):
            last = joined[-1] if joined else None
            is_border = part.start == end or part.start % picture.inventory.sizes.segment == 0
            if last is not None and last.stop == part.start and not is_border:
                joined[-1] = Fault(last.start, part.stop, last.reason)
            else:
                joined.append(part)
    return [
        fault if fault.reason != _UNKNOWN else Fault(fault.start, fault.stop, reason_at(views, fault.start))
        for fault in joined
    ]


def _by_segment(fault: Fault, inventory: Inventory) -> Iterable[Fault]:
    """A fault cut at the borders of segments. Of many that are missing all but the first are one."""
    whole = inventory.sizes.segment
    there = sorted(inventory.segments)
    start, alone = fault.start, 0
    reason = fault.reason
    while start < fault.stop:
        stop = min(fault.stop, start - start % whole + whole)
        alone = alone + 1 if start not in inventory.segments else 0
        if alone > MISSING_ALONE_MAX:
            following = bisect.bisect_left(there, start)
            stop = min(fault.stop, there[following]) if following < len(there) else fault.stop
        yield Fault(start, stop, reason)
        start, reason = stop, _UNKNOWN


def _has_unwritten_page(views: LogViews, fault: Fault) -> bool:
    base = views.start_of(fault.start)
    view = views.view(base)
    if view is None:
        return False
    first, stop = fault.start - base, min(fault.stop - base, len(view)) // PAGE_BYTES * PAGE_BYTES
    ends = range(first - first % PAGE_BYTES + PAGE_BYTES, stop + 1, PAGE_BYTES)
    return any(not view[max(first, end - _PAGE_TAIL_BYTES) : end].any() for end in ends)


def _of_faults(picture: Picture, faults: list[Fault], known: list[tuple[int, int]]) -> Iterable[Finding]:
    """Findings for damage; missing segments between others have been told by the inventory."""
    for fault in faults:
        kind = _KINDS.get(fault.reason, Kind.RECORD_MAGIC)
        is_known = any(start <= fault.start and fault.stop <= stop for start, stop in merged(known))
        if is_known:
            yield _finding(picture, Kind.KNOWN_HOLE, fault.start, fault.stop - fault.start, f"{kind}")
        elif kind is not Kind.SEGMENT_MISSING:
            yield _finding(picture, kind, fault.start, fault.stop - fault.start)


def _finding(picture: Picture, kind: Kind, position: int, size: int, text: str = "") -> Finding:
    offset = position % picture.inventory.sizes.segment
    return Finding(kind, picture.inventory.segment_name(position), offset, position, size=size, text=text)


def _of_tail(io: StoreIO, picture: Picture, end: int, fault: Fault | None) -> Iterable[Finding]:
    """What lies behind the log's end and is not zeros."""
    segment = picture.inventory.sizes.segment
    for start, size in sorted(picture.inventory.segments.items()):
        if start + size <= end:
            continue
        position = max(end, start) - start
        fd = io.open(picture.inventory.paths.commit_log / f"{start:020d}")
        try:
            dirty = min(dirty_end(io, fd, position), segment)
        finally:
            io.close(fd)
        if dirty > position:
            reason = record_check.REASON_NAMES[fault.reason] if fault is not None and fault.reason > 0 else ""
            kind = _KINDS.get(fault.reason) if fault is not None else None
            text = f"{kind}: {reason}" if kind is not None and start <= end else ""
            yield _finding(picture, Kind.TORN_TAIL, start + position, dirty - position, text)
