"""Comparing one store of a fixture with what RocketMQ said of it.

    undamaged   everything must be equal: log, records, BLANKs, queues, units, every answer
    damaged     everything that is intact on disk must be readable, what is not must be reported, and no answer may be
                worse than RocketMQ's; with nothing lost the undamaged store's answers must hold too

What is not equal must be one of `differences.DIFFERENCES`. Each store is opened in up to three ways: recovered as it
is, read directly from its files, and recovered from its log alone.
"""

from __future__ import annotations

import enum
import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mqproc.layout import control as words_of
from mqproc.layout import record
from mqproc.layout.record_codec import decode_records
from mqproc.message import PullStatus, StoredMessage
from mqproc.store.reads.log_scan import Conditions
from mqproc.store.reads.queue_bounds import QueueBounds
from mqproc.store.reads.reader import StoreReader
from mqproc.store.slices import Batch, finish
from tests.golden.fixtures import Directory, options_of
from tests.interop import questions
from tests.interop.differences import Deviation, name_of
from tests.interop.opening import Opened
from tests.interop.questions import Answer, Queue, Unit
from tests.interop.stores import Intact, Store, files_of, opened_store

_SHOWN_MAX = 5
_PULL_MESSAGES = 100
_PULL_BYTES = 1 << 20
_KEY_MESSAGES_MAX = 10_000


@dataclass(slots=True)
class Outcome:
    """What comparing a store gave. `named` counts how often each named difference was met."""

    directory: Directory
    answers: int = 0
    named: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def report(self) -> str:
        """What is wrong, empty when nothing is."""
        if not self.wrong:
            return ""
        return f"{self.directory}: {len(self.wrong)} things are wrong:\n" + "\n".join(self.wrong[:_SHOWN_MAX])


class Comparison:
    """One store against its fixture's expected file."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.directory = store.directory
        self.reading = store.reading
        self.intact = store.intact
        self.outcome = Outcome(store.directory)

    def same(self, asked: Answer, theirs: Any, ours: Any) -> None:
        """Note a deviation, unless it has a name."""
        if theirs == ours:
            return
        name = name_of(Deviation(self.store, asked, theirs, ours))
        if name is not None:
            self.outcome.named[name] += 1
        else:
            self.outcome.wrong.append(f"{asked}\n    RocketMQ {theirs}\n    ours     {ours}")

    def demand(self, what: str, expected: Any, found: Any) -> None:
        """Note what must be so whatever RocketMQ did."""
        if expected != found:
            self.outcome.wrong.append(f"{what}\n    expected {expected}\n    found    {found}")

    # What RocketMQ said

    def answers(self, asked: Iterable[Answer]) -> None:
        """Ask what RocketMQ was asked."""
        for question in asked:
            self.outcome.answers += 1
            self.same(question, question["result"], questions.ask(self.reading, question))

    def log(self, expected: Answer) -> None:
        """Where the log begins and ends, and its BLANKs."""
        begin, end = self.reading.records.visible()
        self.same({"op": "minPhyOffset"}, expected["minPhyOffset"], begin)
        self.same({"op": "maxPhyOffset"}, expected["maxPhyOffset"], end)
        self.same({"op": "blanks"}, expected["blanks"], questions.blanks(self.reading))

    def bounds(self, expected: Answer) -> None:
        """Minimum and maximum of every queue that ever had a message."""
        theirs = {
            (queue["topic"], queue["queueId"]): {name: queue[name] for name in ("minOffset", "maxOffset")}
            for queue in expected["queues"]
            if queue["maxOffset"] > 0
        }
        ours = {
            name: {"minOffset": bounds.min_offset, "maxOffset": bounds.max_offset}
            for name, bounds in questions.queues(self.reading).items()
        }
        nothing = {"minOffset": 0, "maxOffset": 0}
        for topic, queue_id in sorted({*theirs, *ours}):
            asked = {"op": "minMax", "topic": topic, "queueId": queue_id}
            queue = topic, queue_id
            self.same(asked, theirs.get(queue, nothing), ours.get(queue, nothing))

    def records(self, expected: Answer) -> None:
        """Every record, decoded, and every unit, but for those that are lost."""
        units = questions.units(self.reading)
        for queue in expected["queues"]:
            ours_of_queue = units.get((queue["topic"], queue["queueId"]), {})
            for offset, unit in enumerate(queue["units"], queue["minOffset"]):
                if unit[0] not in self.intact.lost:
                    self._unit(queue["topic"], queue["queueId"], offset, unit, ours_of_queue)
        ours = {each["phyOffset"]: each for each in questions.records(self.reading, units)}
        for theirs in expected["records"]:
            if (place := theirs["phyOffset"]) not in self.intact.lost:
                self.same({"op": "record", "phyOffset": place}, theirs, ours.pop(place, None))
        self.demand("records that RocketMQ does not have", {}, ours)

    def dispatched_units(self) -> None:
        """The unit of every record, as dispatch derives it."""
        units = questions.units(self.reading)
        for (topic, queue_id), queue in _queued(self.intact.records).items():
            for offset, place in queue:
                listed = self.intact.at[place]
                unit = [place, listed["size"], listed["dispatchTagsCode"]]
                self._unit(topic, queue_id, offset, unit, units.get((topic, queue_id), {}))

    def _unit(self, topic: str, queue_id: int, offset: int, theirs: Unit, ours: dict[int, Unit]) -> None:
        self.same({"op": "unit", "topic": topic, "queueId": queue_id, "offset": offset}, theirs, ours.get(offset))

    # What must be so

    def readable(self, *, by_queue: bool = True, by_key: bool = True) -> None:
        """Every intact record is found by the log's order, its place, its queue, its keys; nothing else is."""
        records = self.intact.records
        batch = finish(
            self.reading.scan(Conditions(), -1, max_messages=1 << 30, max_bytes=1 << 30, max_scan_bytes=1 << 40)
        )
        scanned = [message.physical_offset for message in _messages(batch)]
        self.demand("scan", [each["phyOffset"] for each in records], scanned)
        for each in records:
            found = self.reading.look(each["phyOffset"])
            self.demand(f"record at {each['phyOffset']}", True, found is not None and len(found) == each["size"])
        if by_queue:
            self._readable_by_queue()
        if by_key:
            self._readable_by_key()

    def _readable_by_queue(self) -> None:
        queued, lost = _queued(self.intact.records), _queued(self.intact.lost.values())
        for queue in sorted({*queued, *questions.queues(self.reading)}):
            found_units, corrupt = self._queue_walk(queue)
            self.demand(f"queue {queue}", queued.get(queue, []), found_units)
            bounds = self.reading.queues.bounds(*queue) or QueueBounds(0, 0, 0)
            expected = {
                offset for offset, _place in lost.get(queue, []) if bounds.min_offset <= offset < bounds.max_offset
            }
            self.demand(f"damaged places of queue {queue}", sorted(expected), corrupt)

    def _readable_by_key(self) -> None:
        for (topic, key, unique), places in _by_key(self.intact.records).items():
            answer = self.reading.by_key(topic, key, unique=unique, max_messages=_KEY_MESSAGES_MAX, max_bytes=1 << 30)
            found_places = [message.physical_offset for message in _messages(finish(answer))]
            self.demand(f"key {key!r} of {topic}", places, found_places)

    def _queue_walk(self, queue: Queue) -> tuple[list[tuple[int, int]], list[int]]:
        """(queue offset, physical offset) of all that pulls give, and the queue offsets at which they say CORRUPT."""
        found: list[tuple[int, int]] = []
        corrupt: list[int] = []
        offset = 0
        while True:
            pulled = self.reading.pull(*queue, offset, _PULL_MESSAGES, _PULL_BYTES)
            found += [(each.queue_offset, each.physical_offset) for each in decode_records(pulled.records.data)]
            if pulled.status is PullStatus.CORRUPT:
                corrupt += range(offset, pulled.next_offset)
            ended = pulled.status in (PullStatus.OFFSET_OVERFLOW_ONE, PullStatus.NO_MESSAGE_IN_QUEUE)
            if ended or pulled.next_offset <= offset:
                return found, corrupt
            offset = pulled.next_offset

    def damage_is_told(self, opened: Opened) -> None:
        """What is lost below the log's end lies in a reported hole, and nothing intact does."""
        end = self.reading.records.visible().end
        self.demand("holes counted", len(opened.holes), opened.words[words_of.DAMAGE_HOLES])
        lost = [each for each in self.intact.lost.values() if self._behind_begin(each) and each["phyOffset"] < end]
        self.demand("damaged records in no hole", [], [each["phyOffset"] for each in lost if not _in(opened, each)])
        kept = [each["phyOffset"] for each in self.intact.records if _in(opened, each)]
        self.demand("intact records in a hole", [], kept)
        if not lost:
            self.demand("holes", [], opened.holes)

    def _behind_begin(self, listed: Answer) -> bool:
        """A record before the first file is gone as by retention, not damaged."""
        return bool(listed["phyOffset"] >= self.reading.records.visible().begin)


def _messages(batch: Batch) -> list[StoredMessage]:
    return [message for part in batch.records for message in decode_records(part.data)]


def _in(opened: Opened, listed: Answer) -> bool:
    start, stop = listed["phyOffset"], listed["phyOffset"] + listed["size"]
    return any(start < hole_stop and hole_start < stop for hole_start, hole_stop in opened.holes)


def _queued(records: Iterable[Answer]) -> dict[Queue, list[tuple[int, int]]]:
    """(queue offset, physical offset) of the records that have a place in a queue, by queue."""
    found: dict[Queue, list[tuple[int, int]]] = {}
    for each in records:
        if each["sysFlag"] & record.SYS_FLAG_TRANSACTION_MASK in (0, record.SYS_FLAG_COMMIT):
            queue = found.setdefault((each["topic"], each["queueId"]), [])
            queue.append((each["queueOffset"], each["phyOffset"]))
    return found


def _by_key(records: Iterable[Answer]) -> dict[tuple[str, str, bool], list[int]]:
    """Physical offsets by (topic, key or unique id, whether it is a unique id); rolled back ones are not indexed."""
    found: dict[tuple[str, str, bool], set[int]] = {}
    for each in records:
        if each["sysFlag"] & record.SYS_FLAG_TRANSACTION_MASK == record.SYS_FLAG_ROLLBACK:
            continue
        keys = [(key, False) for key in (each["keys"] or "").split(" ")] + [(each["uniqKey"], True)]
        for key, unique in keys:
            if key:
                found.setdefault((each["topic"], key, unique), set()).add(each["phyOffset"])
    return {name: sorted(places) for name, places in found.items()}


# The three ways


def compare_recovered(directory: Directory) -> Outcome:
    """A private copy, recovered as it is."""
    with opened_store(directory) as (store, opened):
        comparison = Comparison(store)
        expected = directory.expected
        comparison.demand("files as RocketMQ found them", _found_files(directory), store.files_before)
        comparison.same({"op": "opens"}, expected["loadReturned"], True)
        if directory.damaged:
            _compare_damaged(comparison, expected)
        else:
            comparison.records(expected)
        if expected["loadReturned"]:
            comparison.log(expected)
            comparison.bounds(expected)
            comparison.answers(expected["answers"])
        comparison.readable()
        comparison.damage_is_told(opened)
    return comparison.outcome


def _found_files(directory: Directory) -> dict[str, int]:
    """Lengths of the files that RocketMQ opened, or for a store that it had recovered, that it left."""
    expected = directory.expected
    left = directory.closed and not directory.damaged and directory.directory != "store"
    files = expected["diskAfterShutdown" if left else "diskBefore"]["files"]
    return {file["path"]: file["length"] for file in files}


def _compare_damaged(comparison: Comparison, expected: Answer) -> None:
    """`readable` demands that our scan gives just what is intact."""
    undamaged = comparison.directory.undamaged
    comparison.records(undamaged)
    if expected["loadReturned"]:
        ours = [[each["phyOffset"], each["size"]] for each in comparison.intact.records]
        comparison.same({"op": "records"}, expected["recordOffsets"], ours)
    if not comparison.intact.lost:
        comparison.log(undamaged)
        comparison.bounds(undamaged)
        comparison.answers(undamaged["answers"])


def compare_files(directory: Directory) -> Outcome:
    """A store that was closed in order, read from its files with no recovery and no write."""
    expected = directory.expected
    with ExitStack() as stack:
        root = directory.unpack(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        before = files_of(root)
        reading = stack.enter_context(StoreReader(root, options_of(expected))).reading
        comparison = Comparison(Store(directory, reading, Intact(directory, root), stack))
        comparison.log(expected)
        comparison.bounds(expected)
        comparison.records(expected)
        comparison.answers(expected["answers"])
        # What RocketMQ's own recovery left out is there again after ours only.
        comparison.readable(
            by_queue=not expected["recordsNotInQueue"], by_key=not expected["recordsNotInIndexByUniqKey"]
        )
        comparison.demand("files", before, files_of(root))
    return comparison.outcome


def compare_rebuilt(directory: Directory) -> Outcome:
    """A private copy, recovered from its log alone: queues and index are dispatched anew."""
    with opened_store(directory, log_only=True) as (store, opened):
        comparison = Comparison(store)
        expected = directory.expected
        comparison.log(expected)
        comparison.dispatched_units()
        comparison.readable()
        comparison.damage_is_told(opened)
    return comparison.outcome


class Way(enum.Enum):
    """How a store is opened."""

    RECOVERED = enum.member(compare_recovered)
    REBUILT = enum.member(compare_rebuilt)
    FILES = enum.member(compare_files)

    def stores(self, all_stores: Iterable[Directory]) -> list[Directory]:
        """The stores that can be opened so."""
        if self is Way.RECOVERED:
            return list(all_stores)
        return [store for store in all_stores if not store.damaged and (store.closed or self is Way.REBUILT)]


@functools.cache
def outcome_of(way: Way, directory: Directory) -> Outcome:
    """The comparison, made once."""
    compare: Callable[[Directory], Outcome] = way.value
    return compare(directory)
