"""Damage to timer files: verify reports it, repair corrects it, delivery is exactly once."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqproc import Message, StoreReader
from mqproc.layout import timer_files
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.paths import StorePaths
from mqproc.topic_names import TIMER_TOPIC
from tests.support.command_line import call
from tests.support.group import PATIENCE_S, Group, wait_until
from tests.support.store_checks import Row, damage_in, repair

# A stopped store with waiting messages: by time, by level, and some already delivered.


WAITING = 40
OPTIONS = {"mapped_file_size_timer_log": 1024}
PER_FILE = 19
"""Units of a file of the timer log: 1,024 bytes less 16, by 52."""


def make_timed_store(folder: Path) -> Path:
    """A store with 5 delivered messages, then WAITING waiting ones, in 3 timer log files."""
    group = Group(folder / "timed", **OPTIONS).start()
    try:
        with group.client() as client:
            client.create_topic("later", 1)
            for number in range(5):
                # A message that is already due does not wait, so allow time for a busy machine.
                client.send("later", b"soon %d" % number, delay=4)
            wait_until(lambda: group.words()["delivered_messages"] == 5)
            now_ms = client.send("later", b"now").store_timestamp_ms
            for number in range(WAITING):
                due_ms = now_ms + 3_600_000 + 1000 * (number % 4)
                client.send(Message("later", b"%d" % number, deliver_at_ms=due_ms, keys=[f"k{number}"]))
            client.send("later", b"by level", delay_level=18)
            with client.consumer("billing", "later", start="earliest") as consumer:
                assert consumer.receive(max_messages=4, timeout=PATIENCE_S)
            wait_until(lambda: group.words()["timed_messages"] == WAITING)
            group.wait_dispatched()
        assert group.stop() == 0
    finally:
        group.close()
    return group.store


def copy_sparse(store: Path, folder: Path) -> Path:
    """A copy with a sparse wheel."""
    subprocess.run(["cp", "-a", "--sparse=always", store, folder], check=True)
    return folder / store.name


FILE = PER_FILE * timer_files.UNIT_SIZE
"""Where units of a file of the timer log end."""
FIRST_WAITING = 5
LOG = "timerlog/{:020d}"
FLAGS = ["--set", "max_queues=4096"]


@pytest.fixture(scope="module")
def timed_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_timed_store(tmp_path_factory.mktemp("timed"))


def write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def unit_word(place: int, value: int, kind: str = ">q", unit: int = FIRST_WAITING) -> Callable[[StorePaths], None]:
    """Store a field of a unit of the first file."""

    def change(paths: StorePaths) -> None:
        write(paths.timer_log / f"{0:020d}", unit * timer_files.UNIT_SIZE + place, struct.pack(kind, value))

    return change


def check_word(place: int, value: int) -> Callable[[StorePaths], None]:
    return lambda paths: write(paths.timer_check, place, struct.pack(">q", value))


def first_slot(paths: StorePaths) -> int:
    """Offset of the first waiting slot in the wheel."""
    rows = call("store", "dump", paths.timer_wheel, "--json").json["rows"]
    offset: int = max(row["offset"] for row in rows if row["messages"] == 10)
    return offset


def slot_word(place: int, value: int, kind: str = ">q") -> Callable[[StorePaths], None]:
    return lambda paths: write(paths.timer_wheel, first_slot(paths) + place, struct.pack(kind, value))


FOLLOWS = {"timer_unit_wrong", "timer_unit_missing", "timer_slot_wrong"}
"""Findings that follow from a wrong or missing unit."""
WRONG_UNIT = Row("timer_unit_wrong", LOG.format(0), FIRST_WAITING * timer_files.UNIT_SIZE)
CASES: dict[str, tuple[Callable[[StorePaths], Any], list[Row]]] = {
    "a unit's size": (unit_word(0, 51, ">i"), [WRONG_UNIT]),
    "a unit's magic": (unit_word(12, 9, ">i"), [WRONG_UNIT]),
    "a unit's place in the log": (unit_word(28, 0), [WRONG_UNIT]),
    "a unit's message size": (unit_word(36, 7, ">i"), [WRONG_UNIT]),
    "a unit that cancels": (unit_word(12, 5, ">i"), [WRONG_UNIT]),
    "a unit's slot": (unit_word(24, 0x7000_0000, ">i"), [WRONG_UNIT]),
    "a unit's chain": (
        unit_word(4, 0, unit=FIRST_WAITING + 8),
        [Row("timer_unit_wrong", LOG.format(0), (FIRST_WAITING + 8) * timer_files.UNIT_SIZE)],
    ),
    "a file's end": (
        lambda paths: write(paths.timer_log / f"{0:020d}", FILE, bytes(16)),
        [Row("timer_unit_wrong", LOG.format(0), FILE)],
    ),
    "the first file is gone": (
        lambda paths: (paths.timer_log / f"{0:020d}").unlink(),
        [Row("timer_file_missing", LOG.format(0), 0)],
    ),
    "a file between is gone": (
        lambda paths: (paths.timer_log / f"{1024:020d}").unlink(),
        [Row("timer_file_missing", LOG.format(1024), 0)],
    ),
    "the last file is gone": (
        lambda paths: (paths.timer_log / f"{2048:020d}").unlink(),
        [Row("timer_check_ahead", "config/timercheck", 8)],
    ),
    "a short file": (
        lambda paths: (paths.timer_log / f"{2048:020d}").write_bytes(b""),
        [Row("timer_file_length", LOG.format(2048), 0)],
    ),
    "a stray file": (
        lambda paths: (paths.timer_log / "notes").write_text("x"),
        [Row("stray_file", "timerlog/notes")],
    ),
    "no check": (
        lambda paths: paths.timer_check.unlink(),
        [Row("timer_check_missing", "config/timercheck")],
    ),
    "a short check": (
        lambda paths: paths.timer_check.write_bytes(paths.timer_check.read_bytes()[:2100]),
        [Row("timer_file_length", "config/timercheck", 2100)],
    ),
    "a check of zeros": (lambda paths: paths.timer_check.write_bytes(bytes(4096)), []),
    "a check ahead of the queue": (check_word(16, 99), []),
    "a check ahead of time": (
        check_word(0, 1_900_000_000_000_000),
        [Row("timer_check_ahead", "config/timercheck", 0)],
    ),
    "a check that is later than it was written": (
        lambda paths: check_word(0, int.from_bytes(paths.timer_check.read_bytes()[40:48]) + 86_520_000)(paths),
        [Row("timer_check_ahead", "config/timercheck", 0)],
    ),
    "a check ahead of both queues": (
        lambda paths: (check_word(16, 99)(paths), check_word(24, 99)(paths)),
        [Row("timer_check_ahead", "config/timercheck", 16)],
    ),
    "no wheel": (lambda paths: paths.timer_wheel.unlink(), [Row("timer_slot_wrong", "timerwheel")]),
    "a short wheel": (
        lambda paths: paths.timer_wheel.write_bytes(bytes(3200)),
        [Row("timer_file_length", "timerwheel")],
    ),
    "an empty wheel": (
        lambda paths: paths.timer_wheel.write_bytes(bytes(timer_files.WHEEL_FILE_SIZE)),
        [Row("timer_slot_wrong", "timerwheel", None)],
    ),
    "a slot's last unit": (slot_word(16, 0), [Row("timer_slot_wrong", "timerwheel", None)]),
    "a slot's count": (slot_word(24, 3, ">i"), [Row("timer_slot_wrong", "timerwheel", None)]),
    "a slot's time": (slot_word(0, 1 << 40), [Row("timer_slot_wrong", "timerwheel", None)]),
}


PLANNED = {"a unit's size", "the last file is gone", "no check", "an empty wheel", "a short wheel"}
"""Cases whose plan is compared with the execution."""


def anywhere(rows: list[Row]) -> list[Row]:
    """Time determines the place of a slot."""
    return [Row(row.kind, row.file) if row.kind == "timer_slot_wrong" else row for row in rows]


@pytest.mark.parametrize("name", CASES)
def test_damage_is_named_and_repaired(timed_store: Path, tmp_path: Path, name: str) -> None:
    store = copy_sparse(timed_store, tmp_path)
    damage, expected = CASES[name]
    damage(StorePaths(store))
    verified = call("store", "verify", store, "--json", *FLAGS)
    rows = [row._replace(physical_offset=None) for row in damage_in(verified.json)]
    assert verified.code == (1 if expected else 0)
    for row in expected:
        assert row in anywhere(rows), rows
    assert {row.kind for row in rows} <= {row.kind for row in expected} | FOLLOWS
    if name in PLANNED:
        repair(store, FLAGS)
    elif expected:
        done = call("store", "repair", store, "--execute", "--json", *FLAGS)
        assert (done.code, damage_in(done.json)) == (0, []), done


def test_timer_intact_store_is_clean(timed_store: Path) -> None:
    found = call("store", "verify", timed_store, "--json").json
    assert [each for each in found["findings"] if "timer" in each["file"] or "timer" in each["kind"]] == []


def test_timer_message_missing_in_timer_log_is_found(timed_store: Path, tmp_path: Path) -> None:
    """As if the last message had never been filed, but the check counts it."""
    paths = StorePaths(copy_sparse(timed_store, tmp_path))
    last = WAITING + FIRST_WAITING - 2 * PER_FILE - 1
    place = 2048 + last * timer_files.UNIT_SIZE
    write(paths.timer_log / f"{2048:020d}", last * timer_files.UNIT_SIZE, bytes(timer_files.UNIT_SIZE))
    check_word(8, place)(paths)
    findings = call("store", "verify", paths.root, "--json").json["findings"]
    missing = [each for each in findings if each["kind"] == "timer_unit_missing"]
    assert len(missing) == 1
    assert f"queue offset {WAITING + FIRST_WAITING - 1}, due at" in missing[0]["text"]
    assert missing[0]["file"] == f"commitlog/{0:020d}"
    repair(paths.root, FLAGS)


def test_timer_messages_lost_at_log_end_are_not_filed(timed_store: Path, tmp_path: Path) -> None:
    """Only a second repair saw it. The timer is intact as long as the queue has the unit."""
    paths = StorePaths(copy_sparse(timed_store, tmp_path))
    filed = WAITING + FIRST_WAITING
    with StoreReader(paths.root) as reader:
        end = reader.visible.end
    write(paths.queue(TIMER_TOPIC, 0) / f"{0:020d}", filed * UNIT_SIZE, struct.pack(">qiq", end, 300, 0))
    for place in (16, 24):
        check_word(place, filed + 1)(paths)
    assert "the next start files waiting messages again" in str(repair(paths.root, FLAGS).json["recovery"])


@pytest.mark.parametrize(
    ("damage", "is_repaired", "filed"),
    [
        (unit_word(28, 0), True, WAITING),
        # Without a delivery position the log decides.
        (check_word(0, 1 << 50), True, WAITING + FIRST_WAITING),
        (check_word(0, 1 << 50), False, WAITING + FIRST_WAITING),
    ],
    ids=["unit", "check", "check, by a start"],
)
def test_timer_messages_are_delivered_once_after_repair(
    timed_store: Path, tmp_path: Path, damage: Callable[[StorePaths], None], is_repaired: bool, filed: int
) -> None:
    paths = StorePaths(copy_sparse(timed_store, tmp_path))
    damage(paths)
    assert not is_repaired or call("store", "repair", paths.root, "--execute", *FLAGS).code == 0
    group = Group(paths.root, **OPTIONS).start()
    try:
        wait_until(lambda: group.words()["timed_messages"] == WAITING)
        assert group.words()["delivered_messages"] == 0
        assert group.stop() == 0
    finally:
        group.close()
    verified = call("store", "verify", paths.root, "--json")
    assert (verified.code, damage_in(verified.json)) == (0, [])
    rows = [
        row for path in sorted(paths.timer_log.iterdir()) for row in call("store", "dump", path, "--json").json["rows"]
    ]
    assert len({row["physical_offset"] for row in rows}) == len(rows) == filed


def test_timer_files_of_killed_group_are_clean(tmp_path: Path, make_group: Callable[..., Group]) -> None:
    group = make_group(**OPTIONS)
    with group.client() as client:
        for number in range(60):
            client.send("later", b"%d" % number, delay=3600 + number % 3)
            if number == 30:
                wait_until(lambda: group.words()["timed_messages"] > 20)
    group.kill()
    found = call("store", "verify", group.store, "--json")
    assert (found.code, damage_in(found.json)) == (0, [])


def test_info_shows_the_timer_position(timed_store: Path) -> None:
    found = call("store", "info", timed_store, "--json").json
    assert found["timer_filed"] == WAITING + FIRST_WAITING
    assert found["timer_log_end"] == 2048 + (found["timer_filed"] - 2 * PER_FILE) * timer_files.UNIT_SIZE
    assert found["timer_read_ms"] > 1_700_000_000_000
    assert found["parts"]["timerlog"] == {
        "files": 3,
        "bytes": 3 * 1024,
        "on_disk": found["parts"]["timerlog"]["on_disk"],
    }
    assert found["parts"]["timerwheel"]["bytes"] == timer_files.WHEEL_FILE_SIZE
    assert "timer delivered until" in call("store", "info", timed_store).out


def test_timer_misplaced_files_are_quarantined(timed_store: Path, tmp_path: Path) -> None:
    """By a start; verify reports it first."""
    paths = StorePaths(copy_sparse(timed_store, tmp_path))
    places = (paths.timer_wheel, paths.timer_check, paths.timer_log / f"{4096:020d}")
    for place in places:
        place.unlink(missing_ok=True)
        place.mkdir()
    verified = damage_in(call("store", "verify", paths.root, "--json").json)
    assert {row.file for row in verified if row.kind == "misplaced_file"} == {
        str(place.relative_to(paths.root)) for place in places
    }
    assert call("store", "recover", paths.root, "--execute", *FLAGS).code == 0
    assert not any(place.exists() for place in places)
    assert len(list(paths.quarantine.iterdir())) == 3


def test_timer_log_is_quarantined_with_its_contents(timed_store: Path, tmp_path: Path) -> None:
    paths = StorePaths(copy_sparse(timed_store, tmp_path))
    (paths.timer_log / "notes").write_text("mine")
    last = max(paths.timer_log.glob("0*"))
    last.unlink()
    last.mkdir()
    done = call("store", "repair", paths.root, "--execute", "--json", *FLAGS)
    assert (done.code, damage_in(done.json)) == (0, []), done
    kept = paths.root / done.json["kept_in"] / "files/timerlog"
    assert (kept / "notes").read_text() == "mine"
    assert (kept / last.name).is_dir()


def test_timer_log_file_and_wheel_folder_are_repaired(timed_store: Path, tmp_path: Path) -> None:
    """Each is quarantined once, though there are two reasons for it."""
    paths = StorePaths(copy_sparse(timed_store, tmp_path))
    shutil.rmtree(paths.timer_log)
    paths.timer_log.write_text("mine")
    paths.timer_wheel.unlink()
    paths.timer_wheel.mkdir()
    done = call("store", "repair", paths.root, "--execute", "--json", *FLAGS)
    assert (done.code, damage_in(done.json)) == (0, []), done
    kept = paths.root / done.json["kept_in"] / "files"
    assert (kept / "timerlog").read_text() == "mine"
    assert (kept / "timerwheel").is_dir()


@pytest.mark.parametrize("size", [0, timer_files.END_SIZE - 1, timer_files.UNIT_SIZE + 1])
@pytest.mark.parametrize("is_killed", [False, True])
def test_timer_log_nearly_empty_is_repaired(timed_store: Path, tmp_path: Path, size: int, *, is_killed: bool) -> None:
    """The file size is unknown then. A crash may leave an empty file: a start creates it."""
    paths = StorePaths(copy_sparse(timed_store, tmp_path))
    for path in sorted(paths.timer_log.iterdir())[1:]:
        path.unlink()
    os.truncate(paths.timer_log / f"{0:020d}", size)
    if is_killed:
        paths.abort.touch()
    outcome = call("store", "verify", paths.root, "--json", *FLAGS)
    is_damage = size > 0 or not is_killed
    assert outcome.code == int(is_damage), outcome.err
    assert ("timer_file_length" in outcome.json["counts"]) is is_damage
    assert call("store", "repair", paths.root, "--execute", *FLAGS).code == 0
    assert call("store", "verify", paths.root, *FLAGS).code == 0


def test_timer_killed_store_is_clean_after_one_repair(timed_store: Path, tmp_path: Path) -> None:
    """Repair does the work that verify only notes because a start would do it."""
    paths = StorePaths(copy_sparse(timed_store, tmp_path))
    paths.abort.touch()
    paths.timer_wheel.unlink()
    (paths.index / "20991231235959999").touch()
    assert call("store", "verify", paths.root, *FLAGS).code == 0
    assert call("store", "repair", paths.root, "--execute", *FLAGS).code == 0
    assert call("store", "verify", paths.root, *FLAGS).code == 0
