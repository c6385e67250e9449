"""Verify and repair a store in a test, check the report, and undo the repair."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from mqproc.config.options import Options
from mqproc.layout import record
from mqproc.layout.record_codec import check_record
from tests.support.command_line import Outcome, call


class Row(NamedTuple):
    """A finding."""

    kind: str
    file: str
    offset: int | None = None
    physical_offset: int | None = None


# Words in the advice for each kind of damage.
DO = {
    "blank_size": "mqproc store repair corrects it",
    "checkpoint_ahead": "mqproc store repair or a start sets it back",
    "checkpoint_length": "mqproc store repair corrects it",
    "checkpoint_missing": "mqproc store repair or a start creates it",
    "config_unreadable": "correct the file; mqproc store repair moves it to mqproc/repaired/",
    "entry_beyond_log": "mqproc store repair removes them",
    "entry_missing": "mqproc store repair rebuilds it from the log; nothing is lost",
    "entry_wrong": "mqproc store repair rebuilds it from the log; nothing is lost",
    "index_file_length": "mqproc store repair rebuilds it from the log; nothing is lost",
    "index_header": "mqproc store repair rebuilds it from the log; nothing is lost",
    "index_link": "mqproc store repair rebuilds it from the log; nothing is lost",
    "index_missing": "mqproc store repair rebuilds it from the log",
    "index_order": "mqproc store repair rebuilds it from the log; nothing is lost",
    "ledger_unreadable": "mqproc store repair rebuilds it by checking the whole store",
    "lock_misplaced": "move it away by hand: every command that changes a store needs the lock",
    "log_ends_early": "restore the bytes from a copy",
    "mark_unreadable": "mqproc store repair or a start rewrites it after checking the whole store",
    "misplaced_file": "mqproc store repair moves it to mqproc/repaired/",
    "progress_beyond_end": "mqproc store repair or a start sets it back to the queue's end",
    "queue_file_length": "mqproc store repair rebuilds it from the log; nothing is lost",
    "queue_file_missing": "mqproc store repair rebuilds it from the log; nothing is lost",
    "queue_table": "mqproc store repair rebuilds it",
    "queue_offset_repeated": "find the other by key, id, time or mqproc message scan; mqproc store export keeps both",
    "queue_offset_too_high": "find it by key, id, time or mqproc message scan",
    "read_only": "repair the disk, then run mqproc store repair",
    "record_body_crc": "restore the bytes from a copy if there is one",
    "record_crc": "restore the bytes from a copy if there is one",
    "record_magic": "restore the bytes from a copy if there is one",
    "record_offset": "restore the bytes from a copy if there is one",
    "record_queue": "restore the bytes from a copy if there is one",
    "record_size": "restore the bytes from a copy if there is one",
    "record_zeros": "restore the bytes from a copy if there is one",
    "segment_empty": "restore it from a copy if it held records; mqproc store repair removes it",
    "segment_long": "mqproc store repair cuts it and keeps the rest in mqproc/aside/",
    "segment_misnamed": "mqproc store repair renames it; only data without any file is lost",
    "segment_missing": "restore the file from a copy",
    "segment_short": "mqproc store repair extends it with zeros; its records remain",
    "stray_file": "move it away; mqproc store repair moves it to mqproc/repaired/",
    "timer_check_ahead": "mqproc store repair lets the next start rebuild the timer log from the timer's queue",
    "timer_check_missing": "mqproc store repair lets the next start rebuild the timer log from the timer's queue",
    "timer_file_length": "mqproc store repair lets the next start rebuild the timer log from the timer's queue",
    "timer_file_missing": "mqproc store repair lets the next start rebuild the timer log from the timer's queue",
    "timer_slot_wrong": "mqproc store repair or a start rebuilds the wheel from the timer log",
    "timer_unit_missing": "mqproc store repair lets the next start rebuild the timer log from the timer's queue",
    "timer_unit_wrong": "mqproc store repair lets the next start rebuild the timer log from the timer's queue",
    "torn_tail": "mqproc store repair copies it to mqproc/aside/ and cuts it",
    "unit_beyond_log": "mqproc store repair removes them",
    "unit_dangling": "mqproc store repair removes it",
    "unit_missing": "mqproc store repair rebuilds it from the log; nothing is lost",
    "unit_wrong": "mqproc store repair rebuilds it from the log; nothing is lost",
}
# Created by locking the store.
_PASSED_OVER = {"lock"}


def flags_of(options: Options) -> list[str]:
    """Flags for sizes that are unknown without files, and for a small queue table."""
    sizes = {
        "mapped_file_size_commit_log": options.mapped_file_size_commit_log,
        "mapped_file_size_consume_queue": options.mapped_file_size_consume_queue,
        "max_hash_slot_num": options.max_hash_slot_num,
        "max_index_num": options.max_index_num,
        "max_queues": 4096,
    }
    return [part for name, size in sizes.items() for part in ("--set", f"{name}={size}")]


def damage_in(document: Any) -> list[Row]:
    """Damage among a document's findings; checks the advice of each."""
    found = [each for each in document["findings"] if each["severity"] == "damage"]
    for each in found:
        assert DO[each["kind"]] in each["do"], each
        assert each["means"], each
    return [Row(each["kind"], each["file"], each["offset"], each["physical_offset"]) for each in found]


def is_intact(store: Path, offset: int, segment_size: int) -> bool:
    """Whether a record is on disk as it was stored."""
    segment = store / "commitlog" / f"{offset // segment_size * segment_size:020d}"
    if not segment.is_file():
        return False
    data = segment.read_bytes()[offset % segment_size :]
    check = check_record(data, check_property_crc=True)
    at = record.PHYSICAL_OFFSET
    return check.success and check.size > 0 and int.from_bytes(data[at : at + 8], "big") == offset


def contents(store: Path) -> dict[str, str]:
    """Digests of a store's files by name."""
    return {
        str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(store.rglob("*"))
        if path.is_file() and str(path.relative_to(store)) not in _PASSED_OVER
    }


def repair(store: Path, flags: list[str]) -> Outcome:
    """Plan, which changes nothing; then execute exactly the plan.

    Afterwards the store is clean, and a second repair verifies it and has nothing to do.
    """
    before = contents(store)
    plan = call("store", "repair", store, "--json", *flags)
    assert contents(store) == before
    assert (plan.code, plan.json["executed"]) == (1, False), plan
    done = call("store", "repair", store, "--execute", "--json", *flags)
    assert (done.code, done.json["clean"], done.json["executed"]) == (0, True, True), (done.err, done.out)
    assert damage_in(done.json) == []
    assert effects(plan.json["changes"]) == effects(done.json["changes"])
    assert_done(store, before, done.json)
    after = contents(store)
    again = call("store", "repair", store, "--execute", "--json", *flags)
    assert (again.code, again.json["clean"], again.json["executed"], again.json["changes"]) == (0, True, False, [])
    assert contents(store) == after
    return done


def effects(changes: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    """(file, change, size) of each change."""
    return [(each["file"], each["what"], each["bytes"]) for each in changes]


def files_after(before: dict[str, str], done: dict[str, Any]) -> set[str]:
    """Names of the files that a repair reports to leave."""
    gone = {each["file"] for each in done["actions"] if each["what"] == "move aside"}
    names = {name for name in before if not any(name == each or name.startswith(f"{each}/") for each in gone)}
    names -= {change["file"] for change in done["changes"] if change["what"] in ("moved", "removed")}
    return names | {change["moved_to"] or change["file"] for change in done["changes"] if change["what"] != "removed"}


def assert_done(store: Path, before: dict[str, str], done: dict[str, Any]) -> None:
    """Check that exactly the reported changes happened, and that they can be undone."""
    kept = f"{done['kept_in']}/"
    after = {name: digest for name, digest in contents(store).items() if not name.startswith(kept)}
    assert after.keys() == files_after(before, done)
    for change in done["changes"]:
        if change["what"] not in ("moved", "removed"):
            assert after[change["file"]] != before.get(change["file"]), change
            assert (store / change["file"]).stat().st_size == change["bytes"]
    reported = {change["file"] for change in done["changes"]}
    assert {name for name in after if name in before and after[name] != before[name]} <= reported
    assert take_back(store, done) == before


def take_back(store: Path, done: dict[str, Any]) -> dict[str, str]:
    """Digests after the repair is undone as its help describes, in a copy."""
    copy = store.with_name(f"{store.name}-taken-back")
    shutil.copytree(store, copy, symlinks=True)
    for change in done["changes"]:
        if change["what"] in ("made", "moved"):
            (copy / (change["moved_to"] or change["file"])).unlink()
    files = copy / done["kept_in"] / "files"
    if files.exists():
        shutil.copytree(files, copy, dirs_exist_ok=True)
    shutil.rmtree(copy / "mqproc" / "repaired")
    found = contents(copy)
    shutil.rmtree(copy)
    return found
