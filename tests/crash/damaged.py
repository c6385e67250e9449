"""Damage in a store that was recovered: what is intact stays readable, what is not is said, and no other is served."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.layout import control as words_of
from mqproc.layout.record import CRC_TAIL_SIZE
from mqproc.paths import segment_name
from mqproc.store.damage import Hole, load
from mqproc.store.read.reader import StoreReader
from mqproc.types import PullStatus
from tests.crash import checks
from tests.crash.checks import Recovered
from tests.crash.disk import SECTOR
from tests.crash.placed import Placed, expect
from tests.crash.recording_io import Machine

RECORDS_MIN = 3
PULL_MESSAGES = 4_096
# A tail with so much of its name left is still known to have been one.
SEEN_NAME_BYTES = 5

Place = tuple[str, int, int]


@dataclass(slots=True)
class Readable:
    """All that consumers are served: where each message lies in the log and its body; and which places are damaged."""

    messages: dict[Place, tuple[int, bytes]]
    corrupt: list[str]

    @property
    def offsets(self) -> set[int]:
        return {offset for offset, _body in self.messages.values()}


def readable(found: Recovered) -> Readable:
    """Read every queue from its beginning to its end."""
    messages: dict[Place, tuple[int, bytes]] = {}
    corrupt = []
    with StoreReader(found.paths.root, found.options) as reader:
        for queue in reader.queues():
            offset = queue.min_offset
            while offset < queue.max_offset:
                pulled = reader.pull(queue.topic, queue.queue_id, offset, PULL_MESSAGES)
                for message in pulled.messages:
                    place = queue.topic, queue.queue_id, message.queue_offset
                    expect((message.topic, message.queue_id) == place[:2], f"{place} has a message of {message.topic}")
                    messages[place] = message.physical_offset, message.body
                if pulled.status is PullStatus.CORRUPT:
                    corrupt.append(pulled.detail)
                expect(pulled.next_offset > offset, f"{queue.topic} {queue.queue_id} does not go on at {offset}")
                offset = pulled.next_offset
    return Readable(messages, corrupt)


def check_damaged(
    found: Recovered, records: Sequence[Placed], options: Options, machine: Machine, rng: random.Random
) -> None:
    """Damage some records of a recovered store below its marks, recover it once more, and read it.

    Without its marks recovery looks at all of the log, and notes the damage itself; with them readers meet it. The last
    record stays: damage at the log's very end cannot be told from a torn one there without a mark.
    """
    if len(records) < RECORDS_MIN:
        return
    before = readable(found)
    start, stop = _harm(found, records, rng)
    harmed = [placed for placed in records if placed.offset < stop and start < _end(placed)]
    # Where the CRC of a whole record is gone too it reads as one that never had it: only its body is vouched for.
    sure = [placed for placed in harmed if not start <= _end(placed) - CRC_TAIL_SIZE + SEEN_NAME_BYTES <= stop]
    end = found.words[words_of.WRITTEN]
    # After a failed sync marks stay where they were, and what is bad above them counts as torn.
    trusts_marks = not found.paths.read_only.exists() and rng.random() < 0.5
    if not trusts_marks:
        shutil.rmtree(found.paths.marks)
    again = checks.recover(found.paths.root, options, machine)
    now, told = again.words[words_of.WRITTEN], again.words[words_of.DAMAGE_HOLES]
    expect(now == end, f"damage below {end} has cut the log to {now}")
    holes = load(StoreIO(), found.paths).holes
    expect(told == len(holes), f"{told} are told of {holes}")
    lost = [placed.offset for placed in records if placed not in harmed and _is_noted(placed, holes)]
    expect(not lost, f"intact records at {lost[:3]} are taken for damage: {holes}")
    unseen = [] if trusts_marks else [placed.offset for placed in sure if not _is_noted(placed, holes)]
    expect(not unseen, f"damage at {unseen[:3]} is not noted: {holes}")
    after = readable(again)
    wrong = [place for place, message in after.messages.items() if before.messages.get(place) != message]
    expect(not wrong, f"{wrong[:3]} are other messages than before the damage at [{start}, {stop})")
    gone, maybe = {placed.offset for placed in sure}, {placed.offset for placed in harmed}
    served = [place for place, message in after.messages.items() if message[0] in gone]
    expect(not served, f"{served[:3]} are served, though damaged at [{start}, {stop})")
    lacks = [place for place, message in before.messages.items() if message[0] not in maybe | after.offsets]
    expect(not lacks, f"{sorted(lacks)[:3]} are intact, and not served beside damage at [{start}, {stop})")
    silent = gone & before.offsets and not after.corrupt and not holes
    expect(not silent, f"nobody is told of the damage at [{start}, {stop})")


def _harm(found: Recovered, records: Sequence[Placed], rng: random.Random) -> tuple[int, int]:
    """Change a byte, or a sector, in one record, but nothing of the last one; the range whose bytes are others."""
    *others, last = records
    victim = rng.choice(others)
    start = victim.offset + rng.randrange(victim.size)
    stop = start + 1
    if rng.random() < 0.5:
        start -= start % SECTOR
        stop = start + SECTOR
    segment = found.options.mapped_file_size_commit_log
    base = victim.offset // segment * segment
    start, stop = max(start, records[0].offset, base), min(stop, last.offset, base + segment)
    path = found.paths.commit_log / segment_name(base)
    with path.open("r+b") as file:
        file.seek(start - base)
        data = file.read(stop - start)
        harm = bytes(rng.choice([value for value in (0, 255, rng.randrange(256)) if value != byte]) for byte in data)
        file.seek(start - base)
        file.write(harm)
    return start, stop


def _end(placed: Placed) -> int:
    return placed.offset + placed.size


def _is_noted(placed: Placed, holes: Sequence[Hole]) -> bool:
    return any(hole.overlaps(placed.offset, _end(placed)) for hole in holes)
