"""`store repair` and `store recover`: plans, execution, damage, crashes, failing disks.

`test_repair_golden.py` has the damaged stores of RocketMQ, `test_repair_damage.py` damage to each kind of file.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc import Message, StoreReader
from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.ipc.store_lock import StoreLock
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json
from tests.golden.fixtures import GOLDEN, directories, load_fixture, options_of
from tests.support.command_line import Outcome, call
from tests.support.group import Group
from tests.support.records import encode_record
from tests.support.store_builders import SEGMENT, StoppedStore
from tests.support.store_checks import (
    Killed,
    RecordingIO,
    Row,
    damage_in,
    digests,
    flags_of,
    flip,
    is_intact,
    overwrite,
)

BY_NAME = {str(each): each for each in directories(GOLDEN)}


@pytest.mark.parametrize("name", ["a_basic", "e_delay", "g1_retention", "i_broker"])
def test_repair_clean_store_changes_nothing(tmp_path: Path, name: str) -> None:
    store = load_fixture(name, tmp_path).store
    before = digests(store)
    outcome = call("store", "repair", store, "--execute")
    assert outcome.code == 0
    assert outcome.out.endswith("nothing to repair\n")
    assert digests(store) == before


# Plans


@pytest.mark.parametrize("name", sorted(name for name in BY_NAME if not name.endswith("_clean/clean")))
def test_recover_dry_run_matches_recovery(tmp_path: Path, name: str) -> None:
    """Each file that a dry run lists changes, to the listed length, and no other file does."""
    store, flags = BY_NAME[name].unpack(tmp_path), flags_of(options_of(BY_NAME[name].expected))
    before = digests(store)
    planned = call("store", "recover", store, "--dry-run", "--json", *flags).json
    assert digests(store) == before
    done = call("store", "recover", store, "--execute", "--json", *flags).json
    assert (done["log_begin"], done["log_end"], done["holes"]) == (
        planned["log_begin"],
        planned["log_end"],
        planned["holes"],
    )
    after = digests(store)
    expected = set(before)
    for change in planned["changes"]:
        name, what = change["file"], change["what"]
        if what == "moved":
            expected.add(change["moved_to"])
        if what in ("moved", "removed"):
            assert name not in after
            expected.discard(name)
            continue
        expected.add(name)
        assert after[name] != before.get(name)
        assert (store / name).stat().st_size == change["bytes"]
    assert after.keys() == {*expected, "mqproc/queues"}
    changed = {change["file"] for change in planned["changes"]} | {"mqproc/queues"}
    assert {name for name in before if name in after and after[name] != before[name]} <= changed
    again = call("store", "recover", store, "--dry-run", "--json", *flags).json
    assert {change["file"] for change in again["changes"]} <= {"mqproc/opened.json"}


def test_recover_reports_cuts_and_holes(tmp_path: Path) -> None:
    store = BY_NAME["d14_middle_file_gone_abort/before"].unpack(tmp_path)
    outcome = call("store", "recover", store)
    assert outcome.code == 0
    assert call("store", "recover", store, "--detailed-exitcode").code == 2
    assert "the log is [0, 290,296), around 1 damaged range" in outcome.out
    assert outcome.out.endswith("nothing was changed\n")
    store = BY_NAME["d01_zero_tail/before"].unpack(tmp_path / "torn")
    outcome = call("store", "recover", store)
    assert outcome.code == 0
    assert "; cut 190 bytes (bad size); removed 1 segment after it (" in outcome.out
    store = BY_NAME["c4_killed_settled/before"].unpack(tmp_path / "whole")
    assert " to the end 290,296; removed 1 segment after it (" in call("store", "recover", store).out
    assert call("store", "recover", store, "--dry-run", "--execute").code == 2
    refused = call(
        "store", "recover", BY_NAME["d14_middle_file_gone_clean/clean"].unpack(tmp_path / "no"),
        "--set", "on_damage=refuse", "--json",
    )  # fmt: skip
    assert refused.code == 1
    assert "on_damage = refuse" in refused.json["refused"]


# mqproc's stores


@pytest.fixture(scope="module")
def clean_store(tmp_path_factory: pytest.TempPathFactory) -> StoppedStore:
    return StoppedStore(tmp_path_factory.mktemp("whole") / "store")


def harm(store: Path, files: list[Path], rng: random.Random) -> list[tuple[str, str, int]]:
    """Damage a few places of a store; returns a description."""
    done = []
    if rng.random() < 0.4:
        (store / "abort").write_text("123")
    for _ in range(rng.randrange(1, 5)):
        path = store / rng.choice(files)
        size = path.stat().st_size if path.exists() else 0
        if not size:
            continue
        kind = rng.choice(("flip", "garbage", "cut", "lose", "zero"))
        at, length = rng.randrange(size), rng.randrange(1, 2000)
        done.append((kind, str(path.relative_to(store)), at))
        if kind == "flip":
            flip(path, at)
        elif kind == "garbage":
            overwrite(path, at, rng.randbytes(length)[: size - at])
        elif kind == "zero":
            overwrite(path, at, bytes(length)[: size - at])
        elif kind == "cut":
            with path.open("r+b") as file:
                file.truncate(at)
        else:
            path.unlink()
    return done


@pytest.mark.parametrize("seed", range(30))
def test_repair_random_damage(clean_store: StoppedStore, tmp_path: Path, seed: int) -> None:
    """Flipped bits, garbage, cuts and lost files: no intact record is lost."""
    files = [path.relative_to(clean_store.root) for path in sorted(clean_store.root.rglob("*")) if path.is_file()]
    store = tmp_path / "store"
    shutil.copytree(clean_store.root, store)
    done = harm(store, files, random.Random(seed))
    intact = {offset for offset in clean_store.offsets if is_intact(store, offset, SEGMENT)}
    outcome = call("store", "repair", store, "--execute", "--json", *flags_of(clean_store.engine.options))
    assert (outcome.code, damage_in(outcome.json)) == (0, []), done
    with StoreReader(store) as reader:
        assert intact <= {message.physical_offset for message in reader.messages()}, done


@pytest.mark.parametrize("seed", [35, 46, 115, 165])
def test_repair_damage_that_recovery_leaves(clean_store: StoppedStore, tmp_path: Path, seed: int) -> None:
    """Wrong tags code, truncated queue table, lost last segment, and damage near a lost file."""
    test_repair_random_damage(clean_store, tmp_path, seed)


# Interruptions


@pytest.fixture
def damaged(clean_store: StoppedStore, tmp_path: Path) -> Path:
    """Damage to the log, a queue and the index, a stray file, and a torn tail."""
    store = tmp_path / "store"
    shutil.copytree(clean_store.root, store)
    flip(store / "commitlog" / f"{0:020d}", 324 * 10 + 100)
    overwrite(store / "commitlog" / f"{3 * SEGMENT:020d}", 12721, b"torn")
    flip(store / "consumequeue" / "First" / "0" / f"{0:020d}", 207)
    (store / "commitlog" / "notes").write_text("mine")
    next((store / "index").iterdir()).unlink()
    return store


class Call:
    """The repair command over a StoreIO of the test."""

    def __init__(self, store: Path, flags: list[str], patch: pytest.MonkeyPatch) -> None:
        self._arguments = ("store", "repair", store, "--execute", "--json", *flags)
        self._patch = patch

    def __call__(self, io: StoreIO | None = None) -> Outcome:
        with self._patch.context() as patch:
            if io is not None:
                patch.setattr("mqproc.cli.store.repair.StoreIO", lambda: io)
            return call(*self._arguments)


@pytest.fixture
def repair(clean_store: StoppedStore, damaged: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    return Call(damaged, flags_of(clean_store.engine.options), monkeypatch)


def assert_repaired(clean_store: StoppedStore, store: Path, intact: set[int]) -> None:
    with StoreReader(store) as reader:
        assert {message.physical_offset for message in reader.messages()} == intact
    assert call("store", "verify", store, *flags_of(clean_store.engine.options)).code == 0


def intact_of(clean_store: StoppedStore, store: Path) -> set[int]:
    return {offset for offset in clean_store.offsets if is_intact(store, offset, SEGMENT)}


@pytest.fixture
def calls(damaged: Path, repair: Call) -> list[str]:
    """Storage calls of a repair; the store is restored afterwards."""
    spare = damaged.with_name("spare")
    shutil.copytree(damaged, spare)
    io = RecordingIO()
    assert repair(io).code == 0
    shutil.rmtree(damaged)
    spare.rename(damaged)
    return io.calls


def test_repair_killed_at_any_call_is_completed_by_the_next(
    clean_store: StoppedStore, damaged: Path, repair: Call, calls: list[str]
) -> None:
    """Every other time a group starts in between."""
    intact, spare = intact_of(clean_store, damaged), damaged.with_name("spare")
    shutil.copytree(damaged, spare)
    begin, end = calls.index(f"rename {damaged / 'abort'}"), calls.index(f"unlink {damaged / 'abort'}")
    for turn, kill_at in enumerate(range(1, len(calls) + 1, max(1, len(calls) // 14))):
        with pytest.raises(Killed):
            repair(RecordingIO(kill_at))
        assert (damaged / "abort").exists() == (begin < kill_at - 1 <= end), (kill_at, calls[kill_at - 1])
        if turn % 2:
            call("store", "recover", damaged, "--execute", *flags_of(clean_store.engine.options))
            assert not (damaged / "abort").exists()
        outcome = repair()
        assert outcome.code == 0, (kill_at, outcome)
        # Killed just before its end only the report is missing; the next start writes it.
        assert turn % 2 or (damaged / "abort").exists() == (not outcome.json["executed"])
        assert_repaired(clean_store, damaged, intact)
        shutil.rmtree(damaged)
        shutil.copytree(spare, damaged)


class FailingIO(RecordingIO):
    """Calls that change a path with `part` in it fail from the first one on; None: Ctrl-C."""

    def __init__(self, part: str, number: int | None) -> None:
        super().__init__()
        self._part = part
        self._number = number

    def _note(self, call: str, path: Path) -> None:
        super()._note(call, path)
        if self._part in str(path) and call in ("pwrite", "allocate", "set_size", "create"):
            if self._number is None:
                raise KeyboardInterrupt
            raise OSError(self._number, os.strerror(self._number), str(path))


def test_repair_without_space_for_copies_changes_nothing(damaged: Path, repair: Call) -> None:
    before = digests(damaged)
    outcome = repair(FailingIO("repaired", errno.ENOSPC))
    assert (outcome.code, outcome.out) == (3, "")
    assert "No space left on device: originals cannot be copied; nothing was changed" in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert digests(damaged) == before
    assert list((damaged / "mqproc" / "repaired").iterdir()) == []


@pytest.mark.parametrize("part", ["index/", "consumequeue/", "commitlog/0", "mqproc/damage.json", "mqproc/queues"])
def test_repair_disk_full_is_completed_by_the_next(
    clean_store: StoppedStore, damaged: Path, repair: Call, part: str
) -> None:
    intact = intact_of(clean_store, damaged)
    outcome = repair(FailingIO(f"/store/{part}", errno.ENOSPC))
    assert outcome.code in (0, 1)
    if outcome.code == 1:
        assert (damaged / "abort").exists()
        assert outcome.json["clean"] is False if outcome.out else "copies of the changed files" in outcome.err
    assert repair().code == 0
    assert_repaired(clean_store, damaged, intact)


def test_repair_interrupted_names_the_copies(clean_store: StoppedStore, damaged: Path, repair: Call) -> None:
    intact = intact_of(clean_store, damaged)
    outcome = repair(FailingIO("/store/consumequeue", None))
    assert (outcome.code, outcome.out) == (130, "")
    (kept,) = (damaged / "mqproc" / "repaired").iterdir()
    assert f"not finished; {kept} has copies of the changed files; the next repair continues" in outcome.err
    assert (damaged / "abort").exists()
    assert repair().code == 0
    assert_repaired(clean_store, damaged, intact)


class FailingSyncsIO(StoreIO):
    """Syncs of paths with `part` in them fail."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def _sync_with(self, call: Callable[[int], None], fd: int) -> None:
        if self._part in self.path_of(fd):
            raise FailedSyncError(errno.EIO, os.strerror(errno.EIO), self.path_of(fd))
        super()._sync_with(call, fd)


def test_repair_failed_sync_makes_the_store_read_only(clean_store: StoppedStore, damaged: Path, repair: Call) -> None:
    """The disk's contents are unknown: sends are refused until a repair has read the disk."""
    intact = intact_of(clean_store, damaged)
    outcome = repair(FailingSyncsIO("/store/commitlog"))
    assert (outcome.code, outcome.out) == (1, "")
    assert "a sync failed: [Errno 5] Input/output error" in outcome.err
    assert "copies of the changed files; the next repair continues" in outcome.err
    assert "recovery" in (damaged / "mqproc" / "read_only").read_text()
    assert (damaged / "abort").exists()
    still = repair(FailingSyncsIO("/store"))
    assert (still.code, still.out) == (1, "")
    assert "the disk still fails" in still.err
    assert repair().code == 0
    assert not (damaged / "mqproc" / "read_only").exists()
    assert_repaired(clean_store, damaged, intact)


def test_repair_more_damage_than_listed(
    clean_store: StoppedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("mqproc.store.verify.findings", "mqproc.store.recovery.repair"):
        monkeypatch.setattr(f"{place}.LISTED_MAX", 2)
    store = tmp_path / "store"
    shutil.copytree(clean_store.root, store)
    for queue in (store / "consumequeue").glob("*/*"):
        flip(queue / f"{0:020d}", 207)
        flip(queue / f"{0:020d}", 219)
    flags = flags_of(clean_store.engine.options)
    found = call("store", "verify", store, "--json", *flags).json
    assert (found["counts"]["unit_wrong"], found["omitted"]) == (12, 10)
    assert call("store", "repair", store, "--execute", *flags).code == 0
    assert call("store", "verify", store, *flags).code == 0


def test_repair_queue_of_expired_messages(tmp_path: Path) -> None:
    """No record gives the old units; they must still lead below the log's begin."""
    store = load_fixture("g1_retention", tmp_path).store
    units = store / "consumequeue" / "EarlyOnly" / "0" / f"{0:020d}"
    flip(units, 19 * 20 + 2)
    planned = call("store", "repair", store, "--json")
    assert [(row.kind, row.offset) for row in damage_in(planned.json)] == [("unit_beyond_log", 380)]
    assert call("store", "repair", store, "--execute", "--json").json["clean"]
    assert units.read_bytes()[380:400] == units.read_bytes()[360:380]


def test_repair_resets_delay_offsets_to_the_end(tmp_path: Path) -> None:
    store = load_fixture("i_broker", tmp_path).store
    path = store / "config" / "delayOffset.json"
    levels = rocketmq_json.parse(path.read_text())["offsetTable"]
    level = next(level for level, offset in levels.items() if offset)
    path.write_text(json.dumps({"offsetTable": {**levels, level: 10_000, "99": 7}, "mqproc": {"log": 5}}))
    found = damage_in(call("store", "verify", store, "--json").json)
    assert found == [Row("progress_beyond_end", "config/delayOffset.json")]
    assert call("store", "repair", store, "--execute").code == 0
    mended = rocketmq_json.parse(path.read_text())
    assert mended == {"offsetTable": {**levels, "99": 7}, "mqproc": {"log": 5}}


def test_repair_reports_damage_that_remains(clean_store: StoppedStore, tmp_path: Path) -> None:
    """Two records with one place in their queue: the queue can lead to one only."""
    store, twice = tmp_path / "store", clean_store.end
    shutil.copytree(clean_store.root, store)
    time_ms = 1_800_000_000_000
    again = encode_record(
        topic="First", body=b"again", queue_offset=20, physical_offset=twice, store_timestamp_ms=time_ms
    )
    overwrite(store / "commitlog" / f"{3 * SEGMENT:020d}", twice % SEGMENT, again)
    flags = flags_of(clean_store.engine.options)
    planned = call("store", "repair", store, *flags)
    assert planned.code == 0
    assert "stays: queue_offset_repeated commitlog/00000000000000196608 First queue 0: queue offset 20" in planned.out
    done = call("store", "repair", store, "--execute", "--json", *flags)
    assert done.code == 1
    assert [(row.kind, row.physical_offset) for row in damage_in(done.json)] == [("queue_offset_repeated", twice)]
    more = call("store", "repair", store, "--execute", *flags)
    assert (more.code, more.out.splitlines()[-1]) == (1, "nothing more can be repaired")
    assert len(list((store / "mqproc" / "repaired").iterdir())) == 1


# Failed syncs


def test_repair_read_only_store_accepts_messages(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with group.client() as client:
        sent = [client.send(Message("orders", b"x" * 50, keys=[f"k{number}"])) for number in range(30)]
    assert group.stop() == 0
    paths = StorePaths(group.store)
    paths.read_only.write_text("commitlog-flusher: commitlog: Input/output error\n")
    flip(group.store / "commitlog" / f"{0:020d}", sent[7].physical_offset + 95)
    assert call("store", "verify", group.store).code == 1
    outcome = call("store", "repair", group.store, "--execute", "--json")
    assert outcome.out, outcome.err
    found = outcome.json
    assert (outcome.code, found["clean"]) == (0, True)
    why = "the store has been read from the disk and checked"
    assert {"file": "mqproc/read_only", "what": "remove", "why": why} in found["actions"]
    kept = group.store / found["kept_in"] / "files"
    assert (kept / "mqproc" / "read_only").read_text().startswith("commitlog-flusher")
    assert [(each["kind"], each["physical_offset"]) for each in found["findings"]] == [
        ("known_hole", sent[7].physical_offset),
        ("entry_in_hole", sent[7].physical_offset),
    ]
    again = make_group()
    with again.client() as client:
        client.send(Message("orders", b"after"))
        client.wait_dispatched()
        assert sum(queue.max_offset for queue in client.queues("orders")) == 31


def test_repair_corrects_progress_and_settings(tmp_path: Path) -> None:
    store = load_fixture("i_broker", tmp_path).store
    path = store / "config" / "consumerOffset.json"
    value = rocketmq_json.parse(path.read_text())
    key = next(key for key, offsets in value["offsetTable"].items() if any(offsets.values()))
    queue = next(queue for queue, offset in value["offsetTable"][key].items() if offset)
    right = value["offsetTable"][key][queue]
    value["offsetTable"][key][queue] = 10_000
    path.write_text(json.dumps(value))
    (store / "config" / "topics.json").write_text("{ not json")
    (store / "commitlog" / "notes.txt").write_text("mine")
    found = call("store", "verify", store, "--json").json
    kinds = {finding["kind"] for finding in found["findings"] if finding["severity"] == "damage"}
    assert kinds == {"stray_file", "config_unreadable", "progress_beyond_end"}
    outcome = call("store", "repair", store, "--execute", "--json")
    assert outcome.code == 0
    kept = store / outcome.json["kept_in"] / "files"
    assert (kept / "commitlog" / "notes.txt").read_text() == "mine"
    assert (kept / "config" / "topics.json").read_text() == "{ not json"
    assert json.loads((kept / "config" / "consumerOffset.json").read_text()) == value
    mended = rocketmq_json.parse(path.read_text())["offsetTable"][key][queue]
    assert right <= mended < 10_000


def test_repair_store_in_use_is_refused(group: Group, tmp_path: Path) -> None:
    for arguments in (("repair",), ("repair", "--execute"), ("recover",), ("recover", "--execute")):
        outcome = call("store", *arguments[:1], group.store, *arguments[1:])
        assert (outcome.code, outcome.out) == (7, "")
        assert re.search(r"the store is in use by pid .*; mqproc down stops a group\n", outcome.err)
    store = BY_NAME["d18_stray_file/clean"].unpack(tmp_path)
    lock = StoreLock.acquire(StoreIO(), StorePaths(store))
    try:
        assert call("store", "repair", store, "--execute").code == 7
    finally:
        lock.close()
    assert call("store", "repair", store, "--execute").code == 0


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
print("held", flush=True)
sys.stdin.read()
"""


def test_repair_store_in_use_by_rocketmq_is_refused(tmp_path: Path) -> None:
    """RocketMQ holds a POSIX lock on the first byte of the same file."""
    store = BY_NAME["d18_stray_file/clean"].unpack(tmp_path)
    command = [sys.executable, "-c", HOLD, str(store / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        for arguments in (("repair",), ("repair", "--execute"), ("recover",), ("recover", "--execute")):
            outcome = call("store", *arguments[:1], store, *arguments[1:])
            assert (outcome.code, outcome.out) == (7, "")
            assert f"the store is in use by pid {process.pid} since" in outcome.err
        process.communicate(timeout=10)
    assert call("store", "repair", store, "--execute").code == 0


def test_repair_invalid_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for name in ("repair", "recover"):
        for path, code in ((tmp_path / "gone", 5), (tmp_path / "file", 3), (tmp_path, 3)):
            outcome = call("store", name, path)
            assert (outcome.code, outcome.out, len(outcome.err.splitlines())) == (code, "", 1)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize("name", [f"commitlog/{0:020d}", "commitlog", "consumequeue", "index", "config"])
def test_repair_symlink_is_refused(tmp_path: Path, name: str) -> None:
    """Nor is it quarantined: its target belongs to the store."""
    store = BY_NAME["d18_stray_file/clean"].unpack(tmp_path)
    (store / "config").mkdir()
    (store / name).rename(tmp_path / "elsewhere")
    (store / name).symlink_to(tmp_path / "elsewhere")
    assert "a symbolic link" in call("store", "verify", store).out
    outcome = call("store", "repair", store, "--execute")
    assert outcome.code == 3
    assert f"{store / name}: a symlink; replace it by the file first" in outcome.err
    assert (store / name).is_symlink()
