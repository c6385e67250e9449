"""Stores that were killed: what a step has left half done is a note above the marks, and damage below them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.layout import checkpoint, index_file
from mqproc.layout import control as words_of
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.durable_marks import DurableMark
from mqproc.store.recovery.repair import plan_recovery
from mqproc.util.units import PAGE_BYTES
from tests.store.engine import Engine
from tests.store.recovery.recovering import recover
from tests.store.verify.looking import damage_of, flip, looked_at, notes_of, overwrite

QUEUES, EACH = 2, 40
STORED_MS = 1_700_000_000_000
SLOTS, ITEMS = 20, 60
OPTIONS = {
    "mapped_file_size_consume_queue": 10 * UNIT_SIZE,
    "max_hash_slot_num": SLOTS,
    "max_index_num": ITEMS,
}


class Killed:
    """A store of two queues with a key in every record, killed behind a sync of its first half."""

    def __init__(self, root: Path) -> None:
        engine = Engine(root, **OPTIONS)
        self.paths, self.options = engine.paths, engine.options
        for number in range(QUEUES * EACH):
            if number == QUEUES * EACH // 2:
                self.synced = engine.words[words_of.WRITTEN]
            parts = (b"KEYS\x01k%d\x02" % number, b"", b"", b"")
            engine.append("T", [b"body"], STORED_MS + number, queues=QUEUES, fixed_queue=number % QUEUES, parts=parts)
        self.end = engine.words[words_of.WRITTEN]
        engine.segments.close()
        recover(self.paths.root, self.options)
        self.set_marks(self.synced)
        self.paths.abort.touch()

    def set_marks(self, position: int) -> None:
        segments = LogSegments(StoreIO(), self.paths.commit_log, self.options.mapped_file_size_commit_log)
        for name in ("commitlog", "consumequeue", "index"):
            DurableMark(StoreIO(), self.paths.mark(name), segments).move(position, STORED_MS)
        segments.close()

    def set_checkpoint(self, confirmed: int) -> None:
        layout = checkpoint.Checkpoint(confirm_physical_offset=confirmed)
        self.paths.checkpoint.write_bytes(checkpoint.encode(layout))

    def queue_file(self, queue_id: int, number: int) -> Path:
        return self.paths.queue("T", queue_id) / f"{number * 10 * UNIT_SIZE:020d}"

    def forget_units(self, queue_id: int, first: int, stop: int) -> None:
        for each in range(first, stop):
            overwrite(self.queue_file(queue_id, each // 10), each % 10 * UNIT_SIZE, bytes(UNIT_SIZE))

    def kinds(self) -> tuple[set[str], set[str]]:
        """Those of the damage, those of the notes."""
        found = looked_at(self.paths.root, **OPTIONS)
        return {row.kind for row in damage_of(found)}, {row.kind for row in notes_of(found)}


@pytest.fixture
def killed(tmp_path: Path) -> Killed:
    return Killed(tmp_path / "store")


def test_whole_but_not_closed(killed: Killed) -> None:
    assert killed.kinds() == (set(), {"not_closed"})


def test_one_queue_has_its_units_and_another_does_not(killed: Killed) -> None:
    killed.forget_units(0, 30, 40)
    assert killed.kinds() == (set(), {"not_closed", "not_dispatched"})
    killed.forget_units(0, 19, 30)
    assert killed.kinds() == ({"unit_missing"}, {"not_closed", "not_dispatched"})


def test_a_closed_store_has_no_step_half_done(killed: Killed) -> None:
    killed.forget_units(0, 30, 40)
    killed.paths.abort.unlink()
    assert killed.kinds()[0] == {"unit_missing"}


def test_a_mark_that_the_log_has_outlived_tells_nothing(killed: Killed) -> None:
    killed.forget_units(0, 30, 40)
    flip(killed.paths.commit_log / f"{0:020d}", killed.synced - 1)
    assert "unit_missing" in killed.kinds()[0]


def test_an_index_that_ends_early(killed: Killed) -> None:
    names = sorted(os.listdir(killed.paths.index))
    assert len(names) == 2
    file = killed.paths.index / names[1]
    begun = file.with_name(str(int(names[1]) + 1))
    os.truncate(file, 0)
    assert killed.kinds() == (set(), {"not_closed", "not_indexed", "file_begun"})
    # Of a file that is not the newest of its row nobody was making anything.
    begun.touch()
    assert killed.kinds() == ({"index_file_length"}, {"not_closed", "not_indexed", "file_begun"})
    begun.unlink()
    file.unlink()
    assert killed.kinds() == (set(), {"not_closed", "not_indexed"})
    (killed.paths.index / names[0]).unlink()
    assert killed.kinds() == ({"index_missing"}, {"not_closed"})


def test_entries_below_and_above_the_mark_are_told_apart(killed: Killed) -> None:
    first, second = (killed.paths.index / name for name in sorted(os.listdir(killed.paths.index)))
    second.unlink()
    entries = QUEUES * EACH // 2 - 1
    overwrite(first, index_file.ITEM_COUNT, (index_file.FIRST_ITEM + entries).to_bytes(4, "big"))
    found = looked_at(killed.paths.root, **OPTIONS)
    assert [(str(finding.kind), finding.count) for finding in found.findings.in_order() if finding.count] == [
        ("entry_missing", 1),
        ("not_indexed", QUEUES * EACH // 2),
    ]


def test_a_record_that_was_being_written(killed: Killed) -> None:
    log = killed.paths.commit_log / f"{0:020d}"
    overwrite(log, killed.end, b"torn")
    assert killed.kinds() == (set(), {"not_closed", "torn_tail"})
    killed.paths.abort.unlink()
    assert killed.kinds() == ({"torn_tail"}, set())


def test_pages_that_came_neither_to_the_disk_nor_into_a_copy(killed: Killed) -> None:
    """Later ones did. Above all that was durable the log ends there; below, what was acknowledged lies behind them."""
    log, size = killed.paths.commit_log / f"{0:020d}", 1000
    start = 2 * PAGE_BYTES - size
    assert killed.synced < start < start + size < killed.end
    overwrite(log, start, bytes(size))
    # Copied before the checkpoint was.
    assert "record_size" in killed.kinds()[0]
    plan = plan_recovery(killed.paths, killed.options)
    assert (plan.log_end, len(plan.holes)) == (killed.end, 1)

    killed.set_checkpoint(killed.synced)
    assert killed.kinds() == (set(), {"not_closed", "record_size", "unit_in_hole", "entry_in_hole"})
    plan = plan_recovery(killed.paths, killed.options)
    assert (killed.synced < plan.log_end <= start, plan.holes, plan.cuts) == (True, [], [])

    # Bytes that have changed there are no page that is missing, and without a mark nobody knows.
    overwrite(log, start, b"\xff" * size)
    assert "record_size" in killed.kinds()[0]
    overwrite(log, start, bytes(size))
    killed.paths.mark("commitlog").unlink()
    assert "record_size" in killed.kinds()[0]
    assert plan_recovery(killed.paths, killed.options).log_end == killed.end


def test_a_topic_that_was_being_made(killed: Killed) -> None:
    """Neither the settings nor a folder know it yet."""
    shutil.rmtree(killed.paths.queue("T", 0).parent)
    killed.set_marks(0)
    (killed.paths.config / "topics.json").write_text('{"topicConfigTable": {"U": {"topicName": "U"}}}')
    assert killed.kinds() == (set(), {"not_closed", "not_dispatched"})
    killed.set_marks(killed.synced)
    assert killed.kinds() == (set(), {"not_closed", "topic_deleted"})


@pytest.mark.parametrize("row", ["commitlog", "consumequeue"])
def test_a_file_that_was_being_made(killed: Killed, row: str) -> None:
    if row == "commitlog":
        begun = killed.paths.commit_log / f"{killed.options.mapped_file_size_commit_log:020d}"
    else:
        killed.forget_units(1, 30, 40)
        begun = killed.queue_file(1, 3)
        begun.unlink()
    begun.touch()
    damage, notes = killed.kinds()
    assert (damage, notes - {"not_dispatched"}) == (set(), {"not_closed", "file_begun"})
    killed.paths.abort.unlink()
    assert killed.kinds()[0] & {"segment_empty", "queue_file_length"}


def test_the_next_start_puts_all_that_is_noted_in_order(killed: Killed) -> None:
    killed.forget_units(0, 25, 40)
    killed.queue_file(1, 3).write_bytes(b"")
    os.truncate(killed.paths.index / max(os.listdir(killed.paths.index)), 0)
    assert plan_recovery(killed.paths, killed.options).refused == ""
    damage, notes = killed.kinds()
    assert (damage, notes) == (set(), {"not_closed", "not_dispatched", "not_indexed", "file_begun"})
    recover(killed.paths.root, killed.options)
    killed.paths.abort.unlink(missing_ok=True)
    assert killed.kinds() == (set(), set())
