"""Recover, verify, repair and compare stores; kill recovery at any call."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mqproc.config.options import Options
from mqproc.io.fault_injection import io_from_environment
from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.ipc.control_words import Words
from mqproc.layout import control as words_of
from mqproc.layout import record
from mqproc.paths import StorePaths
from mqproc.store import damage
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.recovery.rebuild import NO_SCANNERS, Scanners
from mqproc.store.recovery.recovery import Recovery, adopt_sizes
from mqproc.store.verify import Finding, VerifyResult, verify_store
from tests.support.command_line import Outcome, call
from tests.support.records import check_record

NOW_MS = 1_800_000_000_000
PAGE = 4096
Unit = tuple[int, int, int]


class Killed(BaseException):
    """Simulates the kill of the process."""


class RecordingIO(StoreIO):
    """Records every modifying call; raises `Killed` instead of call `kill_at`, counted from 1."""

    def __init__(self, kill_at: int = 0) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._kill_at = kill_at
        self._paths: dict[int, Path] = {}

    @property
    def lasting_calls(self) -> list[str]:
        """The calls without those for the queue table, which every start rebuilds."""
        return [call for call in self.calls if not call.split("/")[-1].startswith("queues")]

    def _note(self, call: str, path: Path) -> None:
        self.calls.append(f"{call} {path}")
        if len(self.calls) == self._kill_at:
            raise Killed(self.calls[-1])

    def open(self, path: Path, *, write: bool = False, create: bool = False, mode: int = 0o644) -> int:
        if create and not path.exists():
            self._note("create", path)
        fd = super().open(path, write=write, create=create, mode=mode)
        self._paths[fd] = path
        return fd

    def make_folder(self, folder: Path, mode: int = 0o755, *, sync: bool = True) -> None:
        if not folder.exists():
            self._note("make_folder", folder)
        super().make_folder(folder, mode, sync=sync)

    def write_file_atomically(
        self, path: Path, data: bytes, mode: int = 0o644, failed: Callable[[FailedSyncError], object] | None = None
    ) -> None:
        self._note("replace", path)
        super().write_file_atomically(path, data, mode, failed)

    def rename(self, source: Path, target: Path, between: Callable[[], None] | None = None) -> None:
        self._note("rename", target)
        super().rename(source, target, between)

    def unlink(self, path: Path) -> None:
        if path.exists():
            self._note("unlink", path)
        super().unlink(path)

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        self._note("pwrite", self._paths.get(fd, Path("?")))
        super().pwrite(fd, data, offset)

    def zero(self, fd: int, offset: int, size: int) -> None:
        self._note("zero", self._paths[fd])
        super().zero(fd, offset, size)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        self._note("allocate", self._paths[fd])
        super().allocate(fd, offset, size)

    def set_size(self, fd: int, size: int) -> None:
        self._note("set_size", self._paths[fd])
        super().set_size(fd, size)

    def sync(self, fd: int) -> None:
        self._note("sync", self._paths[fd])
        super().sync(fd)


@dataclass(slots=True)
class Recovered:
    """A store after recovery. `said` are the reported lines."""

    paths: StorePaths
    options: Options
    words: Words
    said: list[str]

    @property
    def end(self) -> int:
        return self.words[words_of.WRITTEN]

    @property
    def begin(self) -> int:
        return self.words[words_of.MIN_PHYSICAL_OFFSET]

    @property
    def dispatched(self) -> int:
        return self.words[words_of.DISPATCHED]

    @property
    def holes(self) -> list[tuple[int, int, str]]:
        """The holes in damage.json."""
        return [(hole.start, hole.stop, hole.kind) for hole in damage.load(StoreIO(), self.paths).holes]

    @property
    def cuts(self) -> list[tuple[int, int]]:
        return [(cut.end, cut.durable_end) for cut in damage.load(StoreIO(), self.paths).cuts]

    def queues(self) -> dict[tuple[str, int], tuple[int, int]]:
        """(minimum, maximum) of every queue that has or had a message."""
        table = QueueTable(StoreIO(), self.paths.queues)
        try:
            bounds = {
                (topic, queue_id): (table.min_offset(number), table.max_offset(number))
                for number, topic, queue_id in table.live()
            }
            ends = [table.next_offset(number) for number, _topic, _queue_id in table.live()]
            assert ends == [maximum for _minimum, maximum in bounds.values()]
        finally:
            table.close()
        return {queue: ends for queue, ends in bounds.items() if ends[1]}

    def units(self, topic: str, queue_id: int) -> dict[int, Unit]:
        """(physical offset, size, tags code) of the queue's units, by queue offset."""
        return self.units_of({(topic, queue_id): self.queues()[topic, queue_id]})[topic, queue_id]

    def units_of(self, queues: Mapping[tuple[str, int], tuple[int, int]]) -> dict[tuple[str, int], dict[int, Unit]]:
        """Units of these queues, which are given with their (minimum, maximum)."""
        found = {}
        files = ConsumeQueueFiles(StoreIO(), self.paths.consume_queue, self.options.consume_queue_file_bytes)
        try:
            for queue, (minimum, maximum) in queues.items():
                data = files.read_units(*queue, minimum, maximum - minimum) if maximum > minimum else b""
                units: list[Unit] = as_units(data).tolist()
                assert len(units) == maximum - minimum
                found[queue] = dict(enumerate(units, minimum))
        finally:
            files.close()
        return found

    def said_of(self, step: str) -> str:
        """The line of a step of recovery."""
        (line,) = [line for line in self.said if line.startswith(f"recovery: {step}:")]
        return line


def recover(
    root: Path,
    options: Options,
    *,
    clean: bool | None = None,
    io: StoreIO | None = None,
    scanners: Scanners = NO_SCANNERS,
) -> Recovered:
    """Recover the store at `root`. `clean`: it was closed; None = by its `abort` file."""
    io, paths, said = io or io_from_environment(os.environ), StorePaths(root), list[str]()
    options = adopt_sizes(io, paths, options, said.append)
    words = Words(bytearray(words_of.FILE_SIZE))
    clean = not paths.abort.exists() if clean is None else clean
    recovery = Recovery(io, paths, options, words, said.append, clean=clean, scanners=scanners, now_ms=lambda: NOW_MS)
    recovery.run()
    return Recovered(paths, options, words, said)


# Files that each start rebuilds.
_REBUILT = ("mqproc/queues", "mqproc/queues.next", "mqproc/queues.next.tmp", "mqproc/control")


def contents(root: Path, *, without: Container[str] = _REBUILT) -> dict[str, tuple[int, bytes]]:
    """Length and nonzero pages of a store's files, without those that each start rebuilds."""
    found = {name: entry.path for name, entry in entries_below(root) if entry.is_file()}
    return {name: _nonzero_pages(path) for name, path in found.items() if name not in without}


def entries_below(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """The entries below a folder, with paths relative to `root`, sorted by path parts."""
    return _below(str(root), "")


def _below(folder: str, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    with os.scandir(folder) as scanned:
        entries = sorted(scanned, key=_name)
    for entry in entries:
        name = prefix + entry.name
        yield name, entry
        if entry.is_dir(follow_symlinks=False):
            yield from _below(entry.path, f"{name}/")


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _nonzero_pages(path: str) -> tuple[int, bytes]:
    """Length, and nonzero pages, each after its offset; holes are not read."""
    pages = []
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        for start, stop in written_ranges(fd, size):
            data = os.pread(fd, stop - start, start)
            for at in range(0, len(data), PAGE):
                page = data[at : at + PAGE]
                if page.count(0) != len(page):
                    pages += [(start + at).to_bytes(8, "little"), page]
    finally:
        os.close(fd)
    return size, b"".join(pages)


def written_ranges(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of a file outside its holes."""
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, at


# Verify, with findings as short rows


class Row(NamedTuple):
    """A finding without its text."""

    kind: str
    file: str
    offset: int | None = None
    physical_offset: int | None = None


def verify(store: Path, *, jobs: int = 1, shares: int = 1, **options: Any) -> VerifyResult:
    """Verify a store; one job runs in this process."""
    return verify_store(StoreIO(), StorePaths(store), Options(**options), jobs=jobs, shares=shares, share_bytes=100)


def row_of(finding: Finding) -> Row:
    return Row(str(finding.kind), finding.file, finding.offset, finding.physical_offset)


def damage_of(found: VerifyResult) -> list[Row]:
    """Findings of damage, causes first."""
    return [row_of(finding) for finding in found.findings.in_order() if finding.severity == "damage"]


def notes_of(found: VerifyResult) -> list[Row]:
    """Findings that are notes."""
    return [row_of(finding) for finding in found.findings.in_order() if finding.severity == "note"]


def flip(path: Path, offset: int, bits: int = 1) -> None:
    """Change bits of one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bits]))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


# Repair by command: the advice for each finding, the plan, its execution, and undoing it


# Part of the advice for each kind of damage.
ADVICE = {
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
# Created by locking the store, and by commands that report lost messages.
_IGNORED = {"lock", "mqproc/errors"}


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
        assert ADVICE[each["kind"]] in each["do"], each
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


def digests(store: Path) -> dict[str, str]:
    """Digests of a store's files by name."""
    return {
        str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(store.rglob("*"))
        if path.is_file() and str(path.relative_to(store)) not in _IGNORED
    }


def repair(store: Path, flags: list[str]) -> Outcome:
    """Plan a repair, which changes nothing; then execute exactly the plan.

    Checks that the store is clean afterwards, and that a second repair changes nothing.
    """
    before = digests(store)
    plan = call("store", "repair", store, "--json", *flags)
    assert digests(store) == before
    assert (plan.code, plan.json["executed"]) == (0, False), plan
    done = call("store", "repair", store, "--execute", "--json", *flags)
    assert (done.code, done.json["clean"], done.json["executed"]) == (0, True, True), (done.err, done.out)
    assert damage_in(done.json) == []
    assert effects(plan.json["changes"]) == effects(done.json["changes"])
    assert_done(store, before, done.json)
    after = digests(store)
    again = call("store", "repair", store, "--execute", "--json", *flags)
    assert (again.code, again.json["clean"], again.json["executed"], again.json["changes"]) == (0, True, False, [])
    assert digests(store) == after
    return done


def effects(changes: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    """(file, change, size) of each change."""
    return [(each["file"], each["what"], each["bytes"]) for each in changes]


def files_after(before: dict[str, str], done: dict[str, Any]) -> set[str]:
    """Names of the files that exist after a repair, by its report."""
    gone = {each["file"] for each in done["actions"] if each["what"] == "move aside"}
    names = {name for name in before if not any(name == each or name.startswith(f"{each}/") for each in gone)}
    names -= {change["file"] for change in done["changes"] if change["what"] in ("moved", "removed")}
    return names | {change["moved_to"] or change["file"] for change in done["changes"] if change["what"] != "removed"}


def assert_done(store: Path, before: dict[str, str], done: dict[str, Any]) -> None:
    """Check that exactly the reported changes happened, and that they can be undone."""
    kept = f"{done['kept_in']}/"
    after = {name: digest for name, digest in digests(store).items() if not name.startswith(kept)}
    assert after.keys() == files_after(before, done)
    for change in done["changes"]:
        if change["what"] not in ("moved", "removed"):
            assert after[change["file"]] != before.get(change["file"]), change
            assert (store / change["file"]).stat().st_size == change["bytes"]
    reported = {change["file"] for change in done["changes"]}
    assert {name for name in after if name in before and after[name] != before[name]} <= reported
    assert undo(store, done) == before


def undo(store: Path, done: dict[str, Any]) -> dict[str, str]:
    """Undo the repair in a copy, as its help describes; return the copy's digests."""
    copy = store.with_name(f"{store.name}-undone")
    shutil.copytree(store, copy, symlinks=True)
    for change in done["changes"]:
        if change["what"] in ("made", "moved"):
            (copy / (change["moved_to"] or change["file"])).unlink()
    files = copy / done["kept_in"] / "files"
    if files.exists():
        shutil.copytree(files, copy, dirs_exist_ok=True)
    shutil.rmtree(copy / "mqproc" / "repaired")
    found = digests(copy)
    shutil.rmtree(copy)
    return found
