"""Every damaged store is clean after `store repair --execute`, with all that was intact; the plan changes nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqproc import Message, StoreReader
from mqproc.io import StoreIO
from mqproc.layout import record
from mqproc.layout.record_codec import check_record
from mqproc.paths import StorePaths
from mqproc.shm.lock import StoreLock
from mqproc.store import rocketmq_json
from tests.cli.calling import call
from tests.conftest import Group
from tests.golden.fixtures import GOLDEN, Directory, directories, load_fixture
from tests.interop.stores import Intact
from tests.store.stopped_store import ITEMS, SEGMENT, SLOTS, StoppedStore
from tests.store.verify.looking import flip, overwrite

BY_NAME = {str(each): each for each in directories(GOLDEN)}
DAMAGED = sorted(name for name, each in BY_NAME.items() if each.damaged)


def contents(store: Path) -> dict[str, str]:
    """Digests of all files by name."""
    return {
        str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(store.rglob("*"))
        if path.is_file()
    }


def assert_everything_intact_is_readable(store: Path, directory: Directory, intact: Intact) -> None:
    """By queue, with its own queue offset; by key; by place."""
    with StoreReader(store) as reader:
        in_queues = {message.physical_offset: message for message in reader.messages()}
        for listed in intact.records:
            message = reader.look(listed["phyOffset"])
            assert message is not None
            assert (message.topic, message.queue_offset) == (listed["topic"], listed["queueOffset"])
            assert in_queues[listed["phyOffset"]].queue_offset == listed["queueOffset"]
        for listed in intact.records[::9]:
            for key in in_queues[listed["phyOffset"]].keys[:1]:
                found = [each.physical_offset for each in reader.by_key(listed["topic"], key, max_messages=1000)]
                assert listed["phyOffset"] in found
    assert len(in_queues) == len(intact.records)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_store_is_clean_after_repair(tmp_path: Path, name: str) -> None:
    directory = BY_NAME[name]
    store = directory.unpack(tmp_path)
    intact = Intact(directory, store)
    before = contents(store)
    was_clean = call("store", "verify", store).code == 0
    plan = call("store", "repair", store, "--json")
    assert contents(store) == before
    assert (plan.code, plan.json["executed"]) == (0 if was_clean else 1, False)
    if was_clean:
        assert (plan.json["actions"], plan.json["changes"]) == ([], [])
        return
    assert plan.json["actions"] or plan.json["changes"]
    done = call("store", "repair", store, "--execute", "--json")
    assert (done.code, done.json["clean"], done.json["executed"]) == (0, True, True)
    assert {finding["severity"] for finding in done.json["findings"]} <= {"note"}
    assert call("store", "verify", store).code == 0
    assert not (store / "abort").exists()
    assert_everything_intact_is_readable(store, directory, intact)
    assert_kept(store, store / done.json["kept_in"], before, done.json["changes"])
    after = contents(store)
    again = call("store", "repair", store, "--execute", "--json")
    assert (again.code, again.json["executed"]) == (0, False)
    assert contents(store) == after


def assert_kept(store: Path, kept: Path, before: dict[str, str], changes: list[dict[str, Any]]) -> None:
    """Whatever is another file now, or none, has its old bytes below the folder of copies, or where it was moved to."""
    for change in changes:
        if change["what"] == "made":
            continue
        name = change["file"]
        copy = store / change["moved_to"] if change["moved_to"] else kept / name
        assert hashlib.sha256(copy.read_bytes()).hexdigest() == before[name], change
    for name, digest in before.items():
        there = store / name
        if there.exists() and hashlib.sha256(there.read_bytes()).hexdigest() == digest:
            continue
        if name != "mqproc/queues" and name != "abort":
            assert any(change["file"] == name for change in changes) or (kept / name).exists(), name
    document = json.loads((kept / "repair.json").read_text())
    assert {"findings", "actions", "changes"} == set(document)


@pytest.mark.parametrize("name", ["a_basic", "e_delay", "g1_retention", "i_broker"])
def test_a_clean_store_needs_no_repair(tmp_path: Path, name: str) -> None:
    store = load_fixture(name, tmp_path).store
    before = contents(store)
    outcome = call("store", "repair", store, "--execute")
    assert outcome.code == 0
    assert outcome.out.endswith("nothing to repair\n")
    assert {name: digest for name, digest in contents(store).items() if name != "lock"} == {
        name: digest for name, digest in before.items() if name != "lock"
    }


# The plan is what is done


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_dry_run_says_what_recovery_then_does(tmp_path: Path, name: str) -> None:
    """Each file that a dry run says would change does, to the length that it says, and no other."""
    store = BY_NAME[name].unpack(tmp_path)
    before = contents(store)
    planned = call("store", "recover", store, "--dry-run", "--json").json
    assert contents(store) == before
    done = call("store", "recover", store, "--execute", "--json").json
    assert (done["log_begin"], done["log_end"], done["holes"]) == (
        planned["log_begin"],
        planned["log_end"],
        planned["holes"],
    )
    after = contents(store)
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
    assert {*after} - {"abort", "lock"} == {*expected, "mqproc/queues"} - {"abort", "lock"}
    changed = {change["file"] for change in planned["changes"]} | {"mqproc/queues", "abort", "lock"}
    assert {name for name in before if name in after and after[name] != before[name]} <= changed
    again = call("store", "recover", store, "--dry-run", "--json").json
    assert {change["file"] for change in again["changes"]} <= {"mqproc/opened.json"}


def test_recover_says_cuts_and_holes(tmp_path: Path) -> None:
    store = BY_NAME["d14_middle_file_gone_abort/before"].unpack(tmp_path)
    outcome = call("store", "recover", store)
    assert outcome.code == 1
    assert "the log is [0, 290,296), around 1 damaged ranges" in outcome.out
    assert outcome.out.endswith("nothing was changed\n")
    store = BY_NAME["d01_zero_tail/before"].unpack(tmp_path / "torn")
    outcome = call("store", "recover", store)
    assert outcome.code == 0
    assert "cut 190 bytes" in outcome.out
    assert call("store", "recover", store, "--dry-run", "--execute").code == 2
    refused = call(
        "store", "recover", BY_NAME["d14_middle_file_gone_clean/clean"].unpack(tmp_path / "no"),
        "--set", "on_damage=refuse", "--json",
    )  # fmt: skip
    assert refused.code == 1
    assert "on_damage = refuse" in refused.json["refused"]


# Our own stores


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> StoppedStore:
    return StoppedStore(tmp_path_factory.mktemp("whole") / "store")


FLAGS = ("--set", f"max_hash_slot_num={SLOTS}", "--set", f"max_index_num={ITEMS}")


def harm(store: Path, files: list[Path], rng: random.Random) -> list[tuple[str, str, int]]:
    """Damage a few places of a store; what was done."""
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
def test_random_damage_is_repaired(whole: StoppedStore, tmp_path: Path, seed: int) -> None:
    """Flipped bits, garbage, cuts and lost files anywhere: clean afterwards, and no intact record is lost."""
    files = [path.relative_to(whole.root) for path in sorted(whole.root.rglob("*")) if path.is_file()]
    store = tmp_path / "store"
    shutil.copytree(whole.root, store)
    done = harm(store, files, random.Random(seed))
    intact = {offset for offset in whole.offsets if is_intact(store, offset)}
    outcome = call("store", "repair", store, "--execute", "--json", *FLAGS)
    damage = [each for each in outcome.json["findings"] if each["severity"] == "damage"]
    assert (outcome.code, damage) == (0, []), done
    with StoreReader(store) as reader:
        assert intact <= {message.physical_offset for message in reader.messages()}, done


@pytest.mark.parametrize("seed", [35, 46, 115, 165])
def test_damage_that_recovery_alone_leaves_is_repaired(whole: StoppedStore, tmp_path: Path, seed: int) -> None:
    """A wrong tags code; damage in what a lost file led to; a cut queue table; the last segment lost behind damage."""
    test_random_damage_is_repaired(whole, tmp_path, seed)


def is_intact(store: Path, offset: int) -> bool:
    segment = store / "commitlog" / f"{offset // SEGMENT * SEGMENT:020d}"
    if not segment.exists():
        return False
    data = segment.read_bytes()[offset % SEGMENT :]
    check = check_record(data, check_property_crc=True)
    at = record.PHYSICAL_OFFSET
    return check.success and check.size > 0 and int.from_bytes(data[at : at + 8], "big") == offset


def test_a_read_only_store_takes_messages_after_repair(make_group: Callable[..., Group]) -> None:
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
    assert {"file": "mqproc/read_only", "what": "remove", "why": "the whole log has been read and checked"} in found[
        "actions"
    ]
    kept = group.store / found["kept_in"]
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


def test_progress_and_settings_are_put_right(tmp_path: Path) -> None:
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
    kept = store / outcome.json["kept_in"]
    assert (kept / "commitlog" / "notes.txt").read_text() == "mine"
    assert (kept / "config" / "topics.json").read_text() == "{ not json"
    assert json.loads((kept / "config" / "consumerOffset.json").read_text()) == value
    mended = rocketmq_json.parse(path.read_text())["offsetTable"][key][queue]
    assert right <= mended < 10_000


def test_a_store_in_use_is_not_touched(group: Group, tmp_path: Path) -> None:
    for arguments in (("repair",), ("repair", "--execute"), ("recover",), ("recover", "--execute")):
        outcome = call("store", *arguments[:1], group.store, *arguments[1:])
        assert (outcome.code, outcome.out) == (7, "")
        assert "the store is in use by pid" in outcome.err
    store = BY_NAME["d18_stray_file/clean"].unpack(tmp_path)
    lock = StoreLock.acquire(StoreIO(), StorePaths(store))
    try:
        assert call("store", "repair", store, "--execute").code == 7
    finally:
        lock.close()
    assert call("store", "repair", store, "--execute").code == 0


def test_wrong_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for name in ("repair", "recover"):
        for path in (tmp_path / "gone", tmp_path / "file", tmp_path):
            outcome = call("store", name, path)
            assert (outcome.code, outcome.out, len(outcome.err.splitlines())) == (3, "", 1)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_link_is_not_repaired(tmp_path: Path) -> None:
    store = BY_NAME["d18_stray_file/clean"].unpack(tmp_path)
    segment = store / "commitlog" / f"{0:020d}"
    segment.rename(tmp_path / "elsewhere")
    segment.symlink_to(tmp_path / "elsewhere")
    outcome = call("store", "repair", store, "--execute")
    assert outcome.code == 3
    assert "a symlink; put the file itself there first" in outcome.err


def test_directories_are_whole(tmp_path: Path) -> None:
    """What `Intact` compares with is the undamaged store, so nothing of it is missing without damage."""
    directory = dataclasses.replace(BY_NAME["d18_stray_file/clean"])
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        assert Intact(directory, directory.unpack(Path(folder))).lost == {}
