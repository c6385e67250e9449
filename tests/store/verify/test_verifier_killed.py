"""Verify of killed stores: incomplete steps are notes above the marks, damage below them."""

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
from tests.support.store_builders import Engine
from tests.support.store_checks import damage_of, flip, notes_of, overwrite, recover, verify

QUEUES, EACH = 2, 40
STORED_MS = 1_700_000_000_000
SLOTS, ITEMS = 20, 60
OPTIONS = {
    "mapped_file_size_consume_queue": 10 * UNIT_SIZE,
    "max_hash_slot_num": SLOTS,
    "max_index_num": ITEMS,
}


class Killed:
    """A store of two queues with a key in every record, killed after a sync of its first half."""

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
        """Kinds of the damage, and of the notes."""
        found = verify(self.paths.root, **OPTIONS)
        return {row.kind for row in damage_of(found)}, {row.kind for row in notes_of(found)}


@pytest.fixture
def killed(tmp_path: Path) -> Killed:
    return Killed(tmp_path / "store")


def test_store_not_closed_is_a_note(killed: Killed) -> None:
    assert killed.kinds() == (set(), {"not_closed"})


def test_undispatched_units_above_mark_are_a_note(killed: Killed) -> None:
    killed.forget_units(0, 30, 40)
    assert killed.kinds() == (set(), {"not_closed", "not_dispatched"})
    killed.forget_units(0, 19, 30)
    assert killed.kinds() == ({"unit_missing"}, {"not_closed", "not_dispatched"})


def test_closed_store_missing_units_are_damage(killed: Killed) -> None:
    killed.forget_units(0, 30, 40)
    killed.paths.abort.unlink()
    assert killed.kinds()[0] == {"unit_missing"}


def test_mark_that_does_not_match_log_is_ignored(killed: Killed) -> None:
    killed.forget_units(0, 30, 40)
    flip(killed.paths.commit_log / f"{0:020d}", killed.synced - 1)
    assert "unit_missing" in killed.kinds()[0]


def test_index_ending_early_above_mark_is_a_note(killed: Killed) -> None:
    names = sorted(os.listdir(killed.paths.index))
    assert len(names) == 2
    file = killed.paths.index / names[1]
    begun = file.with_name(str(int(names[1]) + 1))
    os.truncate(file, 0)
    assert killed.kinds() == (set(), {"not_closed", "not_indexed", "file_begun"})
    # Only the newest file can have been under creation.
    begun.touch()
    assert killed.kinds() == ({"index_file_length"}, {"not_closed", "not_indexed", "file_begun"})
    begun.unlink()
    file.unlink()
    assert killed.kinds() == (set(), {"not_closed", "not_indexed"})
    (killed.paths.index / names[0]).unlink()
    assert killed.kinds() == ({"index_missing"}, {"not_closed"})


def test_index_entries_missing_below_and_above_mark(killed: Killed) -> None:
    first, second = (killed.paths.index / name for name in sorted(os.listdir(killed.paths.index)))
    second.unlink()
    entries = QUEUES * EACH // 2 - 1
    overwrite(first, index_file.ITEM_COUNT, (index_file.FIRST_ITEM + entries).to_bytes(4, "big"))
    found = verify(killed.paths.root, **OPTIONS)
    assert [(str(finding.kind), finding.count) for finding in found.findings.in_order() if finding.count] == [
        ("entry_missing", 1),
        ("not_indexed", QUEUES * EACH // 2),
    ]


def test_torn_record_at_log_end_is_a_note(killed: Killed) -> None:
    log = killed.paths.commit_log / f"{0:020d}"
    overwrite(log, killed.end, b"torn")
    assert killed.kinds() == (set(), {"not_closed", "torn_tail"})
    killed.paths.abort.unlink()
    assert killed.kinds() == ({"torn_tail"}, set())


def test_log_page_missing_above_mark_is_a_note(killed: Killed) -> None:
    """Later pages were written. Above the durable mark the log ends there; below it is damage."""
    log, size = killed.paths.commit_log / f"{0:020d}", 1000
    start = 2 * PAGE_BYTES - size
    assert killed.synced < start < start + size < killed.end
    overwrite(log, start, bytes(size))
    # Like a copy made before the checkpoint was written.
    assert "record_size" in killed.kinds()[0]
    plan = plan_recovery(killed.paths, killed.options)
    assert (plan.log_end, len(plan.holes)) == (killed.end, 1)

    killed.set_checkpoint(killed.synced)
    assert killed.kinds() == (set(), {"not_closed", "record_size", "unit_in_hole", "entry_in_hole"})
    plan = plan_recovery(killed.paths, killed.options)
    assert (killed.synced < plan.log_end <= start, plan.holes, plan.cuts) == (True, [], [])

    # Changed bytes are not a missing page; without a mark this is unknown.
    overwrite(log, start, b"\xff" * size)
    assert "record_size" in killed.kinds()[0]
    overwrite(log, start, bytes(size))
    killed.paths.mark("commitlog").unlink()
    assert "record_size" in killed.kinds()[0]
    assert plan_recovery(killed.paths, killed.options).log_end == killed.end


def test_topic_in_creation_is_a_note(killed: Killed) -> None:
    """Neither the settings nor a folder contain it yet."""
    shutil.rmtree(killed.paths.queue("T", 0).parent)
    killed.set_marks(0)
    (killed.paths.config / "topics.json").write_text('{"topicConfigTable": {"U": {"topicName": "U"}}}')
    assert killed.kinds() == (set(), {"not_closed", "not_dispatched"})
    killed.set_marks(killed.synced)
    assert killed.kinds() == (set(), {"not_closed", "topic_deleted"})


@pytest.mark.parametrize("row", ["commitlog", "consumequeue"])
def test_file_in_creation_is_a_note(killed: Killed, row: str) -> None:
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


def test_next_start_repairs_everything_noted(killed: Killed) -> None:
    killed.forget_units(0, 25, 40)
    killed.queue_file(1, 3).write_bytes(b"")
    os.truncate(killed.paths.index / max(os.listdir(killed.paths.index)), 0)
    assert plan_recovery(killed.paths, killed.options).refused == ""
    damage, notes = killed.kinds()
    assert (damage, notes) == (set(), {"not_closed", "not_dispatched", "not_indexed", "file_begun"})
    recover(killed.paths.root, killed.options)
    killed.paths.abort.unlink(missing_ok=True)
    assert killed.kinds() == (set(), set())
