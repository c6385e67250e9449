"""Damage below the durable mark is recorded, reported once, and dropped after a repair.

Also: recovery accepts wrong lengths, stray files and garbage in small files; it refuses symlinks and files of other
owners; it can be interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import struct
from pathlib import Path

import pytest

from mqproc.config.options import OnDamage
from mqproc.errors import CorruptStoreError, StoreAccessError
from mqproc.io.fault_injection import CRASH_POINTS, FaultInjectionIO
from mqproc.io.store_io import FolderEntry, StoreIO
from mqproc.layout import control as words_of
from mqproc.layout import queue_table as table_layout
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.store.consumequeue.bounds import filler_position
from tests.support.fakes import NoRoomForQueues
from tests.support.store_builders import PER_FRAME, SEGMENT, StoppedStore, assert_whole, keyed, write_at
from tests.support.store_checks import NOW_MS, RecordingIO, contents, recover


@pytest.fixture
def store(tmp_path: Path) -> StoppedStore:
    return StoppedStore(tmp_path / "store")


def flip(store: StoppedStore, number: int) -> None:
    """Change a byte of a message's body."""
    store.overwrite(store.offsets[number] + 100, b"\xff")


def forget_marks(store: StoppedStore, *names: str) -> None:
    for name in names or ("commitlog", "consumequeue", "index"):
        (store.root / "mqproc" / "marks" / name).unlink()


def place_of(store: StoppedStore, number: int) -> tuple[int, int]:
    return store.offsets[number], store.offsets[number + 1]


def hole_of(store: StoppedStore, number: int, kind: str = "bad body CRC") -> tuple[int, int, str]:
    return (*place_of(store, number), kind)


# Damage


def test_hole_is_recorded_reported_once_and_has_fillers(store: StoppedStore) -> None:
    flip(store, 70)
    forget_marks(store)
    found = store.recover()
    start, stop, kind = hole_of(store, 70)
    assert found.holes == [(start, stop, kind)]
    assert found.words[words_of.DAMAGE_HOLES] == 1
    assert found.words[words_of.DAMAGE_READ_ONLY] == 0
    (line,) = [line for line in found.said if line.startswith("damage:")]
    assert f"{store.segment(start)}: offset {start:,}" in line
    written = json.loads((store.root / "mqproc" / "damage.json").read_text())
    assert written["holes"] == [
        {
            "start": start,
            "stop": stop,
            "kind": kind,
            "first_seen_ms": NOW_MS,
            "filled": True,
            "segment": f"{0:020d}",
            "offset_in_segment": start,
        }
    ]
    fillers = [unit for queue in found.queues() for unit in found.units(*queue).values() if unit[1] == FILLER_SIZE]
    assert fillers == [(filler_position(start, SEGMENT), FILLER_SIZE, 0)]
    assert_whole(store, found, lost={70})
    again = store.recover(clean=False)
    assert again.holes == found.holes
    assert again.words[words_of.DAMAGE_HOLES] == 1
    assert not [line for line in again.said if line.startswith("damage:")]
    assert "; 1 damaged range, 0 of them new" in again.said_of("log")


def test_known_hole_below_mark_does_not_stop_start(store: StoppedStore) -> None:
    """All queues and the index are missing too: they are rebuilt around the hole."""
    flip(store, 70)
    store.overwrite(store.offsets[90], bytes(store.offsets[94] - store.offsets[90]))
    forget_marks(store)
    store.recover()
    shutil.rmtree(store.root / "consumequeue")
    shutil.rmtree(store.root / "index")
    found = store.recover(clean=False)
    assert "from the durable mark" in found.said_of("log")
    assert found.holes == [hole_of(store, 70), (store.offsets[90], store.offsets[94], "zeros")]
    assert_whole(store, found, lost={70, 90, 91, 92, 93})


@pytest.mark.parametrize("harm", [b"\xff\xff\xff\xff\xff\xff\xff\xff", bytes(8)], ids=["garbage", "zeros"])
def test_damage_met_by_dispatch_below_mark_becomes_hole(harm: bytes, store: StoppedStore) -> None:
    """The log's mark is valid, the queues' mark is not: the log is dispatched without a scan."""
    store.overwrite(store.offsets[50], harm)
    store.overwrite(store.offsets[60] + 4, b"\0")
    forget_marks(store, "consumequeue")
    found = store.recover()
    assert [hole[:2] for hole in found.holes] == [place_of(store, 50), place_of(store, 60)]
    assert len([line for line in found.said if line.startswith("damage:")]) == 2
    assert "from the durable mark" in found.said_of("log")
    units = [unit for queue in found.queues() for unit in found.units(*queue).values()]
    offsets = [offset for offset, size, _code in units if size != FILLER_SIZE]
    assert sorted(offsets) == [offset for n, offset in enumerate(store.offsets) if n not in (50, 60)]
    assert len(units) == len(store.offsets)
    before = contents(store.root)
    again = store.recover(clean=False)
    assert contents(store.root) == before
    assert again.holes == found.holes


def test_hole_after_repair_is_dropped(store: StoppedStore) -> None:
    """The segment was restored from a copy."""
    copy = store.segment(0).read_bytes()
    flip(store, 70)
    flip(store, 75)
    forget_marks(store)
    assert len(store.recover().holes) == 2
    store.segment(0).write_bytes(copy)
    flip(store, 75)
    found = store.recover()
    assert found.holes == [hole_of(store, 75)]
    assert_whole(store, found, lost={75})
    store.segment(0).write_bytes(copy)
    found = store.recover(clean=False)
    assert found.holes == []
    assert not (store.root / "mqproc" / "damage.json").exists()
    assert_whole(store, found)


def test_hole_in_expired_segment_is_dropped(store: StoppedStore) -> None:
    flip(store, 70)
    forget_marks(store)
    store.recover()
    store.segment(0).unlink()
    found = store.recover()
    assert (found.begin, found.holes) == (SEGMENT, [])


def test_hole_at_queue_end_keeps_its_offsets(store: StoppedStore) -> None:
    """The last records of a topic's queues are lost; their units existed: offsets stay used."""
    last = store.numbers - 1
    before = store.first.queues()
    lost = set(range(last - PER_FRAME - 3, last - 3))
    store.overwrite(store.offsets[min(lost)], bytes(store.offsets[max(lost) + 1] - store.offsets[min(lost)]))
    forget_marks(store)
    found = store.recover()
    assert found.holes == [(store.offsets[min(lost)], store.offsets[max(lost) + 1], "zeros")]
    assert found.queues() == before
    assert_whole(store, found, lost=lost)


def test_unused_queue_offsets_above_mark_do_not_stop_start(store: StoppedStore) -> None:
    """Another program may count a message without storing it."""
    engine = store.engine
    before = engine.append("First", [b"above the mark"] * 4).tolist()
    engine.append("Second", [b"into the next segment" * 50] * (SEGMENT // 1_000))
    for queue_id in range(4):
        word = table_layout.entry_word(engine.table.find("First", queue_id), table_layout.NEXT_OFFSET)
        engine.table.words[word] += 3
    engine.appender.read_next_offsets()
    behind = engine.append("First", [b"behind the gap"] * 4).tolist()
    found = store.recover(clean=False)
    assert (found.end, found.holes) == (store.end, [])
    units = [found.units("First", queue_id) for queue_id in range(4)]
    assert {unit[0] for each in units for unit in each.values()} >= {*before, *behind}
    assert store.recover().queues() == found.queues()


def test_garbage_before_first_unit_is_ignored(store: StoppedStore) -> None:
    """A recreated topic begins inside its file, which may contain garbage after a power failure."""
    engine = store.engine
    numbers = [engine.table.create_queue("Again", queue_id) for queue_id in range(4)]
    for number in numbers:
        engine.table.words[table_layout.entry_word(number, table_layout.NEXT_OFFSET)] = 23
    engine.appender.read_next_offsets()
    engine.append("Again", [b"above the mark"] * 8)
    size = store.queue_file("First", 0).stat().st_size
    for queue_id in range(4):
        path = store.queue_file("Again", queue_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(struct.pack(">qiq", 0, 796_433_280, -732_891_136_580_372_184) + bytes(range(200, 250)) * 9)
        os.truncate(path, size)
    found = store.recover(clean=False)
    assert {ends for (topic, _queue_id), ends in found.queues().items() if topic == "Again"} == {(23, 25)}
    assert store.recover(clean=False).queues() == found.queues()


def test_hole_at_log_begin_is_reported_at_its_queues(store: StoppedStore) -> None:
    """Its fillers look like those of expired units at a queue's start; here none has expired."""
    flip(store, 0)
    flip(store, 1)
    before = store.first.queues()
    for _ in range(2):
        forget_marks(store)
        found = store.recover()
        assert found.queues() == before
        assert found.holes == [(store.offsets[0], store.offsets[2], "bad body CRC")]
    assert_whole(store, found, lost={0, 1})


def test_fillers_at_queue_end_without_marks_stay(store: StoppedStore) -> None:
    last = store.numbers - 1
    before = store.first.queues()
    lost = set(range(last - PER_FRAME - 3, last - 3))
    store.overwrite(store.offsets[min(lost)], bytes(store.offsets[max(lost) + 1] - store.offsets[min(lost)]))
    for clean in (True, False, True):
        forget_marks(store)
        found = store.recover(clean=clean)
        assert found.queues() == before
    assert_whole(store, found, lost=lost)
    assert "lost units" not in store.recover().said_of("queues")


def test_on_damage_refuse_leaves_store_unchanged(store: StoppedStore) -> None:
    flip(store, 70)
    forget_marks(store)
    before = contents(store.root)
    with pytest.raises(CorruptStoreError, match=f"{0:020d}: offset {store.offsets[70]:,}: damage in the log"):
        store.recover(on_damage=OnDamage.REFUSE)
    after = contents(store.root)
    assert after.pop("mqproc/damage.json")
    assert after == before
    found = store.recover(on_damage=OnDamage.SERVE)
    assert found.holes == [hole_of(store, 70)]
    with pytest.raises(CorruptStoreError):
        store.recover(on_damage=OnDamage.REFUSE)


def test_on_damage_read_only_lasts_until_repair(store: StoppedStore) -> None:
    flip(store, 70)
    forget_marks(store)
    assert store.recover(on_damage=OnDamage.READ_ONLY).words[words_of.DAMAGE_READ_ONLY] == 1
    assert store.recover(on_damage=OnDamage.READ_ONLY).words[words_of.DAMAGE_READ_ONLY] == 1
    assert store.recover(on_damage=OnDamage.SERVE).words[words_of.DAMAGE_READ_ONLY] == 0


def test_invalid_damage_file_is_rebuilt(store: StoppedStore) -> None:
    flip(store, 70)
    forget_marks(store)
    store.recover()
    (store.root / "mqproc" / "damage.json").write_text("{")
    forget_marks(store)
    found = store.recover()
    assert found.holes == [hole_of(store, 70)]
    assert any("cannot be read" in line for line in found.said)


# Segments


def test_segment_missing_below_mark_is_hole(store: StoppedStore) -> None:
    store.segment(SEGMENT).unlink()
    lost = {n for n, offset in enumerate(store.offsets) if SEGMENT <= offset < 2 * SEGMENT}
    before = store.first.queues()
    for _ in range(2):
        found = store.recover(clean=False)
        assert found.holes == [(SEGMENT, 2 * SEGMENT, "missing segment")]
        assert (found.end, found.queues()) == (store.end, before)
    units = [unit for queue in found.queues() for unit in found.units(*queue).values()]
    assert sum(size == FILLER_SIZE for _offset, size, _code in units) == len(lost)
    assert all(offset in keyed(found, n) for n, offset in enumerate(store.offsets) if n not in lost)


@pytest.mark.parametrize("size", [0, 1, 5000, SEGMENT - 1])
def test_segment_truncated_below_mark_has_hole_at_its_end(size: int, store: StoppedStore) -> None:
    ends = [offset + int.from_bytes(store.engine.log_bytes(offset, offset + 4), "big") for offset in store.offsets]
    os.truncate(store.segment(SEGMENT), size)
    lost = {n for n, offset in enumerate(store.offsets) if SEGMENT <= offset < 2 * SEGMENT and ends[n] > SEGMENT + size}
    found = store.recover()
    assert found.end == store.end
    offsets = [offset for n, offset in enumerate(store.offsets) if n not in lost]
    placed = [unit[0] for queue in found.queues() for unit in found.units(*queue).values() if unit[1] != FILLER_SIZE]
    assert sorted(placed) == offsets
    if lost:
        ((start, stop, _kind),) = found.holes
        assert (start, stop) == (store.offsets[min(lost)], 2 * SEGMENT)
    else:
        assert found.holes == []
    assert store.segment(SEGMENT).exists() == (size > 0)
    before = contents(store.root)
    assert store.recover(clean=False).holes == found.holes
    assert contents(store.root) == before


def test_segment_too_long_rest_is_quarantined(store: StoppedStore) -> None:
    with store.segment(SEGMENT).open("ab") as file:
        file.write(b"more than fits")
    with store.segment(0).open("ab") as file:
        file.write(bytes(100))
    found = store.recover()
    assert_whole(store, found)
    aside = list((store.root / "mqproc" / "aside").iterdir())
    assert [path.name for path in aside] == [f"commitlog.{SEGMENT:020d}.rest"]
    assert aside[0].read_bytes() == b"more than fits"
    assert store.segment(0).stat().st_size == SEGMENT


def test_last_segment_lost_appends_continue_in_new_one(store: StoppedStore) -> None:
    """No position in the log and no queue offset is assigned twice."""
    last = store.end // SEGMENT * SEGMENT
    store.segment(store.end).unlink()
    before = store.first.queues()
    for clean in (True, False, True):
        found = store.recover(clean=clean)
        assert found.holes == [(last, last + SEGMENT, "missing segment")]
        assert (found.end, found.dispatched) == (last + SEGMENT, last + SEGMENT)
        assert found.queues() == before
    assert "0 records from the durable mark" in found.said_of("log")


def test_log_lost_offsets_and_positions_continue(store: StoppedStore) -> None:
    for path in (store.root / "commitlog").iterdir():
        path.unlink()
    before = store.first.queues()
    for clean in (True, False):
        found = store.recover(clean=clean)
        assert found.begin == found.end == (store.end // SEGMENT + 1) * SEGMENT
        assert found.queues() == {queue: (ends[1], ends[1]) for queue, ends in before.items()}
        assert found.cuts == [(0, store.end)]


# Names, lengths and garbage


def test_stray_files_are_kept_and_reported(store: StoppedStore) -> None:
    strays = [
        "commitlog/notes.txt",
        "consumequeue/notes.txt",
        "consumequeue/First/notes.txt",
        "consumequeue/First/0/notes.txt",
        "index/notes.txt",
        "config/notes.txt",
    ]
    for stray in strays:
        (store.root / stray).write_text("mine")
    (store.root / "consumequeue" / "First" / "01").mkdir()
    found = store.recover()
    for stray in strays:
        assert (store.root / stray).read_text() == "mine"
    assert sum("left alone" in line for line in found.said) == 6
    assert_whole(store, found)


def test_temporary_files_of_crash_are_deleted(store: StoppedStore) -> None:
    paths = store.first.paths
    being_replaced = [paths.abort, paths.checkpoint, paths.topics, paths.timer_check, paths.settings]
    left = [path.with_name(path.name + ".tmp") for path in being_replaced]
    foreign = paths.config / "notes.tmp"
    for path in (*left, foreign):
        path.write_bytes(b"the next ver")
    found = store.recover(clean=False)
    assert [path for path in left if path.exists()] == []
    assert foreign.exists()
    assert_whole(store, found)


def test_folders_in_place_of_files_are_quarantined(store: StoppedStore) -> None:
    names = [f"commitlog/{store.end // SEGMENT * SEGMENT + SEGMENT:020d}", "index/20990101000000000", "checkpoint"]
    names.append("mqproc/marks/index")
    (store.root / "checkpoint").unlink()
    (store.root / "mqproc" / "marks" / "index").unlink()
    for name in [*names, "config/topics.json"]:
        (store.root / name).mkdir(parents=True)
        (store.root / name / "precious").write_text("kept")
    found = store.recover()
    for name in [*names, "config/topics.json"]:
        aside = ".".join(Path(name).parts[-2:])
        assert (store.root / "mqproc" / "aside" / aside / "precious").read_text() == "kept"
    assert (store.root / "checkpoint").stat().st_size == 4096
    assert_whole(store, found)


def test_garbage_in_small_files_does_not_stop_start(store: StoppedStore) -> None:
    for name in ("checkpoint", "config/topics.json", "mqproc/topics.journal", "mqproc/marks/index", "mqproc/queues"):
        (store.root / name).parent.mkdir(exist_ok=True)
        (store.root / name).write_bytes(b"\xff garbage \xff\n")
    found = store.recover()
    assert_whole(store, found)
    aside = {path.name for path in (store.root / "mqproc" / "aside").iterdir()}
    assert aside == {"config.topics.json"}
    assert any("topics.journal ends early" in line for line in found.said)
    assert (store.root / "checkpoint").stat().st_size == 4096


@pytest.mark.parametrize(
    "name",
    [
        "commitlog",
        "commitlog/00000000000000000000",
        "consumequeue/First",
        "consumequeue/First/0",
        "consumequeue/First/0/00000000000000000000",
        "consumequeue/First/0/stray",
        "index",
        "checkpoint",
        "config/topics.json",
    ],
)
def test_symlink_is_refused_by_name(name: str, store: StoppedStore, tmp_path: Path) -> None:
    path = store.root / name
    path.parent.mkdir(exist_ok=True)
    target = tmp_path / "elsewhere"
    if path.exists():
        path.rename(target)
    path.symlink_to(target)
    before = contents(store.root)
    with pytest.raises(StoreAccessError, match=f"{path}: a symlink"):
        store.recover()
    assert contents(store.root) == before


@pytest.mark.parametrize("name", ["00000000000000065536", "First", "config"])
def test_file_of_another_owner_is_refused_by_name(name: str, store: StoppedStore) -> None:
    class OtherOwner(StoreIO):
        def entries(self, folder: Path) -> list[FolderEntry]:
            found = super().entries(folder)
            return [dataclasses.replace(each, uid=each.uid + (each.name == name)) for each in found]

        def entry(self, path: Path) -> FolderEntry | None:
            found = super().entry(path)
            return dataclasses.replace(found, uid=found.uid + (path.name == name)) if found else None

    with pytest.raises(StoreAccessError, match=f"{name}: belongs to user {os.geteuid() + 1}"):
        store.recover(io=OtherOwner())


def test_queues_without_their_log_stay(store: StoppedStore) -> None:
    shutil.rmtree(store.root / "commitlog")
    before = contents(store.root)
    with pytest.raises(StoreAccessError, match=r"commitlog: no such folder, but .*/consumequeue has queues"):
        store.recover()
    assert contents(store.root) == before


# Interrupted recovery


def test_full_disk_does_not_stop_start(store: StoppedStore) -> None:
    """Dispatch waits; the next offsets are known, and everything is dispatched later."""
    for _ in range(30):
        store.put()
    found = store.recover(clean=False, io=NoRoomForQueues())
    assert found.end == store.end
    assert found.dispatched < found.end
    assert any("dispatch waits" in line for line in found.said)
    whole = store.recover(clean=False)
    assert_whole(store, whole)


POINTS = [point for point in CRASH_POINTS if point.startswith("recover.")]


def test_recovery_killed_at_any_crash_point_recovers(tmp_path: Path) -> None:
    source = StoppedStore(tmp_path / "source")
    source.put()
    for path in (source.root / "mqproc" / "marks").iterdir():
        path.unlink()
    torn = source.end - 50
    source.overwrite(torn, b"\xff" * 50)
    (source.root / "commitlog" / f"{source.end // SEGMENT * SEGMENT + SEGMENT:020d}").write_bytes(bytes(SEGMENT))
    lost = len(source.offsets) - 1
    source.engine.segments.close()
    for point in POINTS:
        root = tmp_path / point
        shutil.copytree(source.root, root)
        if (pid := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                recover(root, source.engine.options, clean=False, io=FaultInjectionIO(point))
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL, point
        found = recover(root, source.engine.options, clean=False)
        assert found.end == source.offsets[lost]
        io = RecordingIO()
        recover(root, source.engine.options, clean=False, io=io)
        assert io.lasting_calls == []
    write_at(root / "checkpoint", 0, bytes(8))
