"""Compare one store of a fixture with RocketMQ's description of it.

    undamaged   everything must be equal: log, records, BLANKs, queues, units, every answer
    damaged     every intact record must be readable, all damage reported, and no answer worse than RocketMQ's; with
                nothing lost, the undamaged store's answers must hold too

Every deviation must be one of `DIFFERENCES`. Each store is opened in up to three ways: recovered, read directly from
its files, and recovered from its log alone.
"""

from __future__ import annotations

import enum
import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mqproc.layout import control as words_of
from mqproc.layout import record
from mqproc.layout.index_file import index_key_hash_of
from mqproc.layout.record_codec import decode_records
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.cooperative import RecordPage, finish
from mqproc.store.read.reader import StoreReader
from mqproc.store.read.records import Conditions
from mqproc.store.read.views import QueueBounds
from mqproc.types import PullStatus, StoredMessage
from tests.golden.fixtures import Directory, options_of
from tests.interop import golden_store
from tests.interop.golden_store import Answer, Intact, Opened, Queue, Store, Unit, ask, files_of, opened_store

# The intended differences from RocketMQ: name, fixtures, reason, condition. A deviation without a matching condition
# fails, and so does a difference without a deviation.


# The index stores whole seconds, relative to its file's first entry.
INDEX_STEP_MS = 1000
# RocketMQ's maxMsgsNumBatch.
_ANSWER_MAX = 64
_LATER_THAN_ALL_MS = 1 << 62


@dataclass(frozen=True, slots=True)
class Deviation:
    """A different result. `asked` is a question, or `{"op": …}` for the whole store."""

    store: Store
    asked: Answer
    theirs: Any
    ours: Any

    @property
    def op(self) -> str:
        operation: str = self.asked["op"]
        return operation


@dataclass(frozen=True, slots=True)
class Difference:
    """A deliberate difference: it occurs in fixtures like one of `fixtures` if `holds` is true.

    `by_chance`: it depends on the questions, so other folders of fixtures may lack it. The golden folder has it unless
    `in_golden` is false.
    """

    name: str
    fixtures: tuple[str, ...]
    reason: str
    holds: Callable[[Deviation], bool]
    by_chance: bool = False
    in_golden: bool = True

    def may_be_in(self, fixture: str) -> bool:
        return any(fnmatchcase(fixture, pattern) for pattern in self.fixtures)


def name_of(deviation: Deviation) -> str | None:
    """Name of the difference that explains a deviation; None without one."""
    fixture = deviation.store.directory.name
    candidates = (each for each in DIFFERENCES if each.may_be_in(fixture))
    return next((each.name for each in candidates if each.holds(deviation)), None)


# Conditions


def _as_undamaged(deviation: Deviation) -> bool:
    """mqproc returns the undamaged store's answer without the lost records."""
    store, ours = deviation.store, deviation.ours
    if deviation.op == "records":
        kept = {tuple(each) for each in deviation.theirs} - {tuple(each) for each in ours}
        return ours == _places(store) and all(place in store.intact.lost for place, _size in kept)
    if deviation.op == "blanks":
        return bool(ours == store.intact.blanks)
    if deviation.op in ("minPhyOffset", "maxPhyOffset"):
        return bool(ours == store.directory.undamaged[deviation.op])
    if deviation.op in ("record", "unit"):
        return False
    return any(ours == ask(reading, deviation.asked) for reading in store.undamaged())


def _places(store: Store) -> list[list[int]]:
    return [[each["phyOffset"], each["size"]] for each in store.intact.records]


def _asked_queues_lost(deviation: Deviation) -> set[int]:
    """Queue offsets of the requested queue whose records are not intact."""
    queue = deviation.asked["topic"], deviation.asked["queueId"]
    lost = deviation.store.intact.lost.values()
    return {each["queueOffset"] for each in lost if (each["topic"], each["queueId"]) == queue}


def _beside_damage(deviation: Deviation) -> bool:
    """The question is about a damaged record; mqproc's answer has only intact ones."""
    check = _BESIDE_DAMAGE.get(deviation.op)
    return check is not None and any(
        check(deviation, ask(reading, deviation.asked)) for reading in deviation.store.undamaged()
    )


def _pull_beside_damage(deviation: Deviation, undamaged: Answer) -> bool:
    asked, theirs, ours = deviation.asked, deviation.theirs, deviation.ours
    stop = max(each["nextBeginOffset"] for each in (theirs, ours, undamaged))
    if not any(asked["offset"] <= offset < stop for offset in _asked_queues_lost(deviation)):
        return False
    if any(ours[name] != undamaged[name] for name in ("minOffset", "maxOffset")):
        return False
    return _has_intact_records(deviation)


def _has_intact_records(deviation: Deviation) -> bool:
    """True if mqproc's pull has intact records of the queue, at their own offsets, in order."""
    asked, ours, intact = deviation.asked, deviation.ours, deviation.store.intact.at
    found = [intact.get(place, {}) for place in ours["phyOffsets"]]
    right = all((each.get("topic"), each.get("queueId")) == (asked["topic"], asked["queueId"]) for each in found)
    offsets = [each.get("queueOffset") for each in found]
    within = all(asked["offset"] <= offset < ours["nextBeginOffset"] for offset in ours["queueOffsets"])
    return right and within and offsets == ours["queueOffsets"] == sorted(set(ours["queueOffsets"]))


def _time_beside_damage(deviation: Deviation, undamaged: Answer) -> bool:
    return deviation.asked["offset"] in _asked_queues_lost(deviation) and deviation.ours["timestamp"] == -1


def _search_beside_damage(deviation: Deviation, undamaged: Answer) -> bool:
    """No record between mqproc's and the undamaged store's offset is intact."""
    low, high = sorted((deviation.ours["offset"], undamaged["offset"]))
    lost = _asked_queues_lost(deviation)
    return low < high and (set(range(low, high)) <= lost or set(range(low + 1, high + 1)) <= lost)


def _keys_beside_damage(deviation: Deviation, undamaged: Answer) -> bool:
    """A lost record has the key, or index files begin at another entry without it."""
    asked, ours, intact = deviation.asked, deviation.ours["phyOffsets"], deviation.store.intact
    if not any(_hits(each, asked) for each in intact.lost.values()):
        return _same_but_for_seconds(deviation, undamaged)
    if asked["begin"] <= 0 and asked["end"] >= _LATER_THAN_ALL_MS:
        newest = [each["phyOffset"] for each in intact.records for _word in range(_hits(each, asked))]
        return bool(ours == newest[-_most(asked) :])
    kept = {place for place in undamaged["phyOffsets"] if place in intact.at}
    return kept <= set(ours) and all(_is_hit(intact.at.get(place), asked) for place in ours)


def _record_beside_damage(deviation: Deviation, undamaged: Answer) -> bool:
    return deviation.asked["phyOffset"] in deviation.store.intact.lost and not deviation.ours["found"]


_BESIDE_DAMAGE = {
    "getMessage": _pull_beside_damage,
    "storeTime": _time_beside_damage,
    "offsetByTime": _search_beside_damage,
    "queryMessage": _keys_beside_damage,
    "look": _record_beside_damage,
}


def _queues_repaired(deviation: Deviation) -> bool:
    """RocketMQ omits records from queues; mqproc's queues are complete."""
    left_out = deviation.store.directory.expected.get("recordsNotInQueue")
    return bool(left_out) and deviation.op != "queryMessage" and _as_undamaged(deviation)


def _index_rebuilt(deviation: Deviation) -> bool:
    """RocketMQ omits records from the index; mqproc's index is complete."""
    left_out = deviation.store.directory.expected.get("recordsNotInIndexByUniqKey")
    return bool(left_out) and deviation.op == "queryMessage" and _as_undamaged(deviation)


def _index_as_dispatched(deviation: Deviation) -> bool:
    """RocketMQ's answer repeats a message, or its index files begin at other seconds."""
    is_key = deviation.op == "queryMessage"
    return is_key and _same_index_end(deviation) and _same_but_for_seconds(deviation, deviation.theirs)


def _same_but_for_seconds(deviation: Deviation, other: Answer) -> bool:
    """Two answers by key that differ only in repeated entries or in where index files begin."""
    asked = deviation.asked
    at = deviation.store.intact.at | deviation.store.intact.lost
    theirs, ours = Counter(other["phyOffsets"]), Counter(deviation.ours["phyOffsets"])
    again, more = theirs - ours, ours - theirs
    # A full answer has no space for an older entry.
    oldest = min(ours, default=0) if ours.total() == _most(asked) else -1
    too_many = all(
        place in ours or place < oldest or not _in_time(at[place], asked) or _at_border(at[place], asked)
        for place in again
    )
    if not too_many or not all(_is_hit(at.get(place), asked) for place in more):
        return False
    # A repeated entry displaces another message if the answer is limited.
    return more.total() <= again.total() or all(_at_border(at[place], asked) for place in more)


def _most(asked: Answer) -> int:
    """Maximum number of entries in an answer."""
    return min(int(asked["maxNum"]), _ANSWER_MAX)


def _same_index_end(deviation: Deviation) -> bool:
    """Only answers with hits have the end of the index."""
    ends = [
        (said["indexLastUpdateTimestamp"], said["indexLastUpdatePhyoffset"])
        for said in (deviation.theirs, deviation.ours)
        if said["phyOffsets"]
    ]
    return len(set(ends)) <= 1


def _in_time(listed: Answer, asked: Answer) -> bool:
    return bool(asked["begin"] <= listed["storeTimestamp"] <= asked["end"])


def _at_border(listed: Answer, asked: Answer) -> bool:
    """True if the rounding to seconds decides whether a record is in the time range."""
    return bool(listed["storeTimestamp"] < asked["begin"] + INDEX_STEP_MS or listed["storeTimestamp"] > asked["end"])


def _hits(listed: Answer, asked: Answer) -> int:
    """Number of a record's entries with the key's hash; rolled back records are not indexed."""
    if listed["sysFlag"] & record.SYS_FLAG_TRANSACTION_MASK == record.SYS_FLAG_ROLLBACK:
        return 0
    keys = [*(listed["keys"] or "").split(" "), listed["uniqKey"]]
    key_hash = index_key_hash_of(asked["topic"], asked["key"])
    return sum(index_key_hash_of(listed["topic"], key) == key_hash for key in keys if key)


def _is_hit(listed: Answer | None, asked: Answer) -> bool:
    """True if the index must return a record: by its key's hash and its second."""
    if listed is None:
        return False
    begin, end = asked["begin"] - INDEX_STEP_MS, asked["end"] + INDEX_STEP_MS
    return _hits(listed, asked) > 0 and bool(begin < listed["storeTimestamp"] < end)


def _index_cut(deviation: Deviation) -> bool:
    """RocketMQ's index ends beyond the log, and mqproc's answer lacks no message of RocketMQ's."""
    if deviation.op != "queryMessage":
        return False
    theirs, ours = deviation.theirs, deviation.ours
    end = deviation.store.reading.records.visible().end
    more = set(ours["phyOffsets"]) - set(theirs["phyOffsets"])
    given = set(theirs["phyOffsets"]) <= set(ours["phyOffsets"])
    hits = all(_is_hit(deviation.store.intact.at.get(place), deviation.asked) for place in more)
    reaches = bool(ours["indexLastUpdatePhyoffset"] < end <= theirs["indexLastUpdatePhyoffset"])
    return given and hits and reaches


def _behind_blank(deviation: Deviation) -> bool:
    theirs = deviation.store.directory.expected["maxPhyOffset"]
    last = [blank for blank in deviation.store.intact.blanks if blank["phyOffset"] == theirs]
    if deviation.op == "blanks":
        return bool(last) and deviation.ours == deviation.theirs + last
    return deviation.op == "maxPhyOffset" and [deviation.ours] == [theirs + blank["size"] for blank in last]


def _continues_after(deviation: Deviation) -> bool:
    """Log and queues are empty; they begin and end at the end of the old ones."""
    asked, ours = deviation.asked, deviation.ours
    undamaged = deviation.store.directory.undamaged
    if deviation.op in ("minPhyOffset", "maxPhyOffset"):
        begin, end = deviation.store.reading.records.visible()
        return bool(begin == end == ours >= undamaged["maxPhyOffset"])
    ends = {(queue["topic"], queue["queueId"]): queue["maxOffset"] for queue in undamaged["queues"]}
    end = ends.get((asked.get("topic"), asked.get("queueId")), 0)
    if deviation.op == "offsetByTime":
        return bool(ours["offset"] == end)
    empty = not ours.get("phyOffsets")
    return deviation.op in ("minMax", "getMessage") and empty and ours["minOffset"] == ours["maxOffset"] == end


def _first_file_for_nothing(deviation: Deviation) -> bool:
    """RocketMQ returns the log's first record for a unit that points to the deleted offset 0."""
    begin, _end = deviation.store.reading.records.visible()
    if deviation.op != "getMessage" or begin == 0 or deviation.theirs["phyOffsets"][:1] != [begin]:
        return False
    asked = deviation.asked
    bounds = deviation.store.reading.rocketmq_queues.bounds(asked["topic"], asked["queueId"])
    data = deviation.store.reading.files.read_units(asked["topic"], asked["queueId"], asked["offset"], 1, bounds.number)
    return as_units(data)["physical_offset"].tolist() == [0] and _has_intact_records(deviation)


def _refused(deviation: Deviation) -> bool:
    return (deviation.op, deviation.theirs, deviation.ours) == ("opens", False, True)


DIFFERENCES = (
    Difference(
        "records after damage are kept",
        ("d07_*", "d14_*"),
        "RocketMQ cuts the log at the first damaged record that its recovery meets, with all intact ones after it; a "
        "scan ends there. Ours records a hole and continues after it.",
        _as_undamaged,
    ),
    Difference(
        "a damaged record is skipped",
        ("d07_*", "d14_*"),
        "RocketMQ returns a body with a wrong CRC, or treats its whole segment as deleted. In ours the place in the "
        "queue stays, and no key finds it.",
        _beside_damage,
    ),
    Difference(
        "a store is opened that RocketMQ refuses",
        ("d16_*", "d18_*"),
        "A CommitLog file of another length or a stray file makes RocketMQ's load fail. Ours extends the former and "
        "ignores the latter.",
        _refused,
    ),
    Difference(
        "queues are repaired from the whole log",
        ("d*",),
        "After a kill RocketMQ dispatches again from the file that its checkpoint names, after a stop in order not at "
        "all; messages before that are gone from queues whose files or units are missing.",
        _queues_repaired,
    ),
    Difference(
        "the index is rebuilt from the whole log",
        ("d*",),
        "After a kill RocketMQ deletes the newest index file and indexes again from the file that its checkpoint "
        "names; after a stop in order it makes no missing file again. Older messages are found by no key any more.",
        _index_rebuilt,
    ),
    Difference(
        "no message is lost by a kill",
        ("c*",),
        "Both of the above after a kill without damage: RocketMQ dispatches again from 3 s before its checkpoint at "
        "most. Messages whose units and entries were not on disk by then are in no queue and no index. No store may "
        "lose them.",
        lambda deviation: _queues_repaired(deviation) or _index_rebuilt(deviation),
        by_chance=True,
        in_golden=False,
    ),
    Difference(
        "the index holds each entry once",
        ("c*", "d*"),
        "After a kill RocketMQ keeps full index files and indexes again from a point below their end. It skips records "
        "below the end offset of the newest file and treats the record at it as new: it adds it again to the next "
        "file, searches return it twice, and the whole seconds of that file count from its time. Ours writes the files "
        "that dispatch without a kill writes.",
        _index_as_dispatched,
        by_chance=True,
    ),
    Difference(
        "the index is cut with the log",
        ("d0[1-6]_*", "d12_*", "d15_*"),
        "RocketMQ leaves index entries of records after the log's end. They take the places of others in an answer "
        "and, once the log grows, point to other records.",
        _index_cut,
    ),
    Difference(
        "the log ends after a BLANK",
        ("d12_*",),
        "Without the next file RocketMQ treats the BLANK's begin as the end of the log, and overwrites it.",
        _behind_blank,
    ),
    Difference(
        "a log whose files are missing continues after them",
        ("d19_*",),
        "RocketMQ begins log and queues at 0 again and assigns offsets twice. Ours takes the end of the log from the "
        "queues.",
        _continues_after,
    ),
    Difference(
        "a unit at physical offset 0 is like others",
        ("g*", "d13_*"),
        "When the file of physical offset 0 is gone, RocketMQ takes the log's first file for it and hands out bytes of "
        "another record. In ours the record is removed.",
        _first_file_for_nothing,
        by_chance=True,
        in_golden=False,
    ),
)


_SHOWN_MAX = 5
_PULL_MESSAGES = 100
_PULL_BYTES = 1 << 20
_KEY_MESSAGES_MAX = 10_000


@dataclass(slots=True)
class Outcome:
    """The result of comparing a store. `named` counts each named difference."""

    directory: Directory
    answers: int = 0
    named: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def report(self) -> str:
        """The failures as text; empty without any."""
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
        """Record a deviation, unless a difference explains it."""
        if theirs == ours:
            return
        name = name_of(Deviation(self.store, asked, theirs, ours))
        if name is not None:
            self.outcome.named[name] += 1
        else:
            self.outcome.wrong.append(f"{asked}\n    RocketMQ {theirs}\n    ours     {ours}")

    def demand(self, what: str, expected: Any, found: Any) -> None:
        """Compare with a value that does not depend on RocketMQ."""
        if expected != found:
            self.outcome.wrong.append(f"{what}\n    expected {expected}\n    found    {found}")

    # RocketMQ's results

    def answers(self, asked: Iterable[Answer]) -> None:
        """Ask mqproc the recorded questions."""
        for question in asked:
            self.outcome.answers += 1
            self.same(question, question["result"], golden_store.ask(self.reading, question))

    def log(self, expected: Answer) -> None:
        """Compare the begin and end of the log, and its BLANKs."""
        begin, end = self.reading.records.visible()
        self.same({"op": "minPhyOffset"}, expected["minPhyOffset"], begin)
        self.same({"op": "maxPhyOffset"}, expected["maxPhyOffset"], end)
        self.same({"op": "blanks"}, expected["blanks"], golden_store.blanks(self.reading))

    def bounds(self, expected: Answer) -> None:
        """Compare the minimum and maximum of every queue that ever had a message."""
        theirs = {
            (queue["topic"], queue["queueId"]): {name: queue[name] for name in ("minOffset", "maxOffset")}
            for queue in expected["queues"]
            if queue["maxOffset"] > 0
        }
        ours = {
            name: {"minOffset": bounds.min_offset, "maxOffset": bounds.max_offset}
            for name, bounds in golden_store.queues(self.reading).items()
        }
        nothing = {"minOffset": 0, "maxOffset": 0}
        for topic, queue_id in sorted({*theirs, *ours}):
            asked = {"op": "minMax", "topic": topic, "queueId": queue_id}
            queue = topic, queue_id
            self.same(asked, theirs.get(queue, nothing), ours.get(queue, nothing))

    def records(self, expected: Answer) -> None:
        """Compare every decoded record and every unit, except for lost ones."""
        units = golden_store.units(self.reading)
        for queue in expected["queues"]:
            ours_of_queue = units.get((queue["topic"], queue["queueId"]), {})
            for offset, unit in enumerate(queue["units"], queue["minOffset"]):
                if unit[0] not in self.intact.lost:
                    self._unit(queue["topic"], queue["queueId"], offset, unit, ours_of_queue)
        ours = {each["phyOffset"]: each for each in golden_store.records(self.reading, units)}
        for theirs in expected["records"]:
            if (place := theirs["phyOffset"]) not in self.intact.lost:
                self.same({"op": "record", "phyOffset": place}, theirs, ours.pop(place, None))
        self.demand("records that RocketMQ does not have", {}, ours)

    def dispatched_units(self) -> None:
        """Compare the unit of every record with the one that dispatch derives."""
        units = golden_store.units(self.reading)
        for (topic, queue_id), queue in _queued(self.intact.records).items():
            for offset, place in queue:
                listed = self.intact.at[place]
                unit = [place, listed["size"], listed["dispatchTagsCode"]]
                self._unit(topic, queue_id, offset, unit, units.get((topic, queue_id), {}))

    def _unit(self, topic: str, queue_id: int, offset: int, theirs: Unit, ours: dict[int, Unit]) -> None:
        self.same({"op": "unit", "topic": topic, "queueId": queue_id, "offset": offset}, theirs, ours.get(offset))

    # Independent of RocketMQ

    def readable(self, *, by_queue: bool = True, by_key: bool = True) -> None:
        """Exactly the intact records are found: by scan, offset, queue and keys."""
        records = self.intact.records
        batch = finish(
            self.reading.scan(Conditions(), -1, max_messages=1 << 30, max_bytes=1 << 30, max_scan_bytes=1 << 40)
        )
        scanned = [message.physical_offset for message in _messages(batch)]
        self.demand("scan", [each["phyOffset"] for each in records], scanned)
        for each in records:
            found = self.reading.record_at(each["phyOffset"])
            self.demand(f"record at {each['phyOffset']}", True, found is not None and len(found) == each["size"])
        if by_queue:
            self._readable_by_queue()
        if by_key:
            self._readable_by_key()

    def _readable_by_queue(self) -> None:
        queued, lost = _queued(self.intact.records), _queued(self.intact.lost.values())
        for queue in sorted({*queued, *golden_store.queues(self.reading)}):
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
        """(queue offset, physical offset) of all pulled messages, and the CORRUPT queue offsets."""
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

    def damage_is_reported(self, opened: Opened) -> None:
        """Lost records below the log's end are in reported holes, intact ones are not."""
        end = self.reading.records.visible().end
        self.demand("holes counted", len(opened.holes), opened.words[words_of.DAMAGE_HOLES])
        lost = [each for each in self.intact.lost.values() if self._after_begin(each) and each["phyOffset"] < end]
        self.demand("damaged records in no hole", [], [each["phyOffset"] for each in lost if not _in(opened, each)])
        kept = [each["phyOffset"] for each in self.intact.records if _in(opened, each)]
        self.demand("intact records in a hole", [], kept)
        if not lost:
            self.demand("holes", [], opened.holes)

    def _after_begin(self, listed: Answer) -> bool:
        """A record before the first file is deleted as by retention, not damaged."""
        return bool(listed["phyOffset"] >= self.reading.records.visible().begin)


def _messages(batch: RecordPage) -> list[StoredMessage]:
    return [message for part in batch.records for message in decode_records(part.data)]


def _in(opened: Opened, listed: Answer) -> bool:
    start, stop = listed["phyOffset"], listed["phyOffset"] + listed["size"]
    return any(start < hole_stop and hole_start < stop for hole_start, hole_stop in opened.holes)


def _queued(records: Iterable[Answer]) -> dict[Queue, list[tuple[int, int]]]:
    """(queue offset, physical offset) of the records that belong to a queue, by queue."""
    found: dict[Queue, list[tuple[int, int]]] = {}
    for each in records:
        if each["sysFlag"] & record.SYS_FLAG_TRANSACTION_MASK in (0, record.SYS_FLAG_COMMIT):
            queue = found.setdefault((each["topic"], each["queueId"]), [])
            queue.append((each["queueOffset"], each["phyOffset"]))
    return found


def _by_key(records: Iterable[Answer]) -> dict[tuple[str, str, bool], list[int]]:
    """Physical offsets by (topic, key, whether it is a unique id), without rolled back ones."""
    found: dict[tuple[str, str, bool], set[int]] = {}
    for each in records:
        if each["sysFlag"] & record.SYS_FLAG_TRANSACTION_MASK == record.SYS_FLAG_ROLLBACK:
            continue
        keys = [(key, False) for key in (each["keys"] or "").split(" ")] + [(each["uniqKey"], True)]
        for key, unique in keys:
            if key:
                found.setdefault((each["topic"], key, unique), set()).add(each["phyOffset"])
    return {name: sorted(places) for name, places in found.items()}


# The three ways of opening a store


def compare_recovered(directory: Directory) -> Outcome:
    """Compare a private copy after recovery."""
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
        comparison.damage_is_reported(opened)
    return comparison.outcome


def _found_files(directory: Directory) -> dict[str, int]:
    """Lengths of the files that RocketMQ opened, or left after a recovery."""
    expected = directory.expected
    left = directory.closed and not directory.damaged and directory.directory != "store"
    files = expected["diskAfterShutdown" if left else "diskBefore"]["files"]
    return {file["path"]: file["length"] for file in files}


def _compare_damaged(comparison: Comparison, expected: Answer) -> None:
    """Compare a damaged store; `readable` compares its scan with the intact records."""
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
    """Compare a cleanly closed store, read from its files without recovery or writes."""
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
        # Only mqproc's recovery restores records that RocketMQ's recovery omitted.
        comparison.readable(
            by_queue=not expected["recordsNotInQueue"], by_key=not expected["recordsNotInIndexByUniqKey"]
        )
        comparison.demand("files", before, files_of(root))
    return comparison.outcome


def compare_rebuilt(directory: Directory) -> Outcome:
    """Compare a private copy recovered from its log alone: queues and index are rebuilt."""
    with opened_store(directory, log_only=True) as (store, opened):
        comparison = Comparison(store)
        expected = directory.expected
        comparison.log(expected)
        comparison.dispatched_units()
        comparison.readable()
        comparison.damage_is_reported(opened)
    return comparison.outcome


class Way(enum.Enum):
    """How a store is opened."""

    RECOVERED = enum.member(compare_recovered)
    REBUILT = enum.member(compare_rebuilt)
    FILES = enum.member(compare_files)

    def stores(self, all_stores: Iterable[Directory]) -> list[Directory]:
        """The stores that can be opened this way."""
        if self is Way.RECOVERED:
            return list(all_stores)
        return [store for store in all_stores if not store.damaged and (store.closed or self is Way.REBUILT)]


@functools.cache
def outcome_of(way: Way, directory: Directory) -> Outcome:
    """The comparison, cached."""
    compare: Callable[[Directory], Outcome] = way.value
    return compare(directory)
