"""Reloadable options of a running group: every process that reads one uses the new value.

One group on a separate disk, started from an options file; each case rewrites the file and sends SIGHUP.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mqproc import DiskFullError, Message, MessageTooLargeError
from mqproc.cli.admin.top import SnapshotSource
from mqproc.client.retry import NO_RETRY
from mqproc.config.options import FIELDS, Options
from mqproc.io.store_io import StoreIO
from mqproc.layout import control as words_of
from mqproc.store.access import read_settings
from tests.grafana.scenarios import can_mount
from tests.support.group import GROUP, ROOT, START_TIMEOUT_S, Group, open_transaction, wait_until
from tests.support.store_builders import ALL_HOURS

DISK_BYTES = 192 << 20
SEGMENT = 65536
NOT_NOW = str((datetime.datetime.now().hour + 12) % 24)
ONE_MINUTE = 60_000
START: dict[str, Any] = {
    "metrics_port": 0,
    "max_queues": 64,
    "mapped_file_size_commit_log": SEGMENT,
    "mapped_file_size_consume_queue": 2000,
    "max_hash_slot_num": 200,
    "max_index_num": 800,
    "max_message_size": 30_000,
    "flush_interval_commit_log": 20,
    "flush_commit_log_thorough_interval": 50,
    "flush_interval_consume_queue": 50,
    "flush_consume_queue_thorough_interval": 100,
    "transaction_timeout": 200,
    "transaction_check_interval": 200,
    "file_reserved_time": 72,
    "delete_when": NOT_NOW,
    "disk_max_used_space_ratio": 99,
    "disk_space_clean_forcibly_ratio": 99,
    "disk_space_warning_level_ratio": 99,
    "disk_floor_bytes": 0,
    "clean_file_forcibly_enable": False,
    "clean_resource_interval": 50,
    "delete_commit_log_files_interval": 0,
    "delete_consume_queue_files_interval": 0,
}
TOP = "top"
"""`mqproc top` follows a group for a long time, too."""

READERS = {
    "store/commitlog/append.py": {words_of.WRITER},
    "store/commitlog/append_templates.py": {words_of.WRITER},
    "roles/writer/admission.py": {words_of.WRITER},
    "roles/flushers.py": {words_of.COMMITLOG_FLUSHER},
    "roles/transactions/coordinator.py": {words_of.QUERY},
    "roles/keeper/role.py": {words_of.KEEPER},
    "store/retention/plan.py": {words_of.KEEPER},
    "store/retention/delete.py": {words_of.KEEPER},
    "metrics/app.py": {words_of.MONITOR},
    "metrics/collector.py": {words_of.MONITOR},
    "metrics/snapshot.py": {words_of.MONITOR, TOP},
    # A command that exits at once, and a Spark task.
    "store/retention/survey.py": set(),
    "spark/sink.py": set(),
    # A text about the options that its caller has.
    "ipc/health.py": set(),
    # The supervisor, which derives retention_guard from the store's maker.
    "store/recovery/recovery.py": set(),
}
"""Processes that run the modules reading a reloadable option."""


class FromFile(Group):
    """A group with its options in a file."""

    def __init__(self, store: Path) -> None:
        super().__init__(store, **START)
        self.options = dict(START)
        self.file = store.with_name("mqproc.toml")
        self._reloads = 0

    def start(self) -> Group:
        self._write()
        self.launch(["up", "--store", str(self.store), "--config", str(self.file)])
        wait_until(self.ready, START_TIMEOUT_S, f"group ready: {self.output.read_text()[-2000:]}")
        return self

    def change(self, **options: Any) -> str:
        """Change the file and send the reload request; return the supervisor's answer."""
        self.options |= options
        self._write()
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)
        self._reloads += 1
        answers: Callable[[], list[str]] = lambda: [  # noqa: E731
            line for line in self.output.read_text().splitlines() if "options reloaded" in line
        ]
        return str(wait_until(lambda: len(found := answers()) == self._reloads and found, what="the reload")[-1])

    def _write(self) -> None:
        # Numbers, strings and booleans are written the same in TOML and JSON.
        self.file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in self.options.items()))

    def word(self, name: str) -> int:
        return self.words()[name]

    def later(self, word: str, more: int) -> None:
        """Wait until a counter has grown by this much."""
        least = self.word(word) + more
        wait_until(lambda: self.word(word) >= least, what=f"{word} = {least:,}")

    def looked_on(self) -> None:
        """Wait for three seconds of the keeper's clock: work with the previous options is done."""
        self.later("keeper.heartbeat_ns", 3_000_000_000)

    def fill(self) -> int:
        """Fill some segments, all durable; return where the last one begins."""
        with self.client() as client:
            for _ in range(4):
                for queue in (0, 1):
                    client.send_many([Message("T", b"x" * 300, queue_id=queue) for _ in range(100)])
            client.wait_dispatched()
        marks = ("commitlog_mark", "cq_synced", "index_synced")
        wait_until(lambda: all(self.word(mark) == self.word("written") for mark in marks), what="all is durable")
        return (self.word("written") - 1) // SEGMENT * SEGMENT


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FromFile]:
    """A running group on a disk that is more than half full."""
    folder = tmp_path_factory.mktemp("reload")
    if not can_mount(folder):
        pytest.skip("a disk of one's own needs root")
    store = folder / "store"
    store.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "mqproc-test", str(store)]
    subprocess.run(command, check=True, capture_output=True, timeout=20)
    running = FromFile(store)
    try:
        running.start()
        with running.client() as client:
            client.create_topic("T", 2)
        with (store / "ballast").open("wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, DISK_BYTES * 6 // 10)
        yield running
    finally:
        running.close()
        gone = lambda: subprocess.run(["umount", str(store)], capture_output=True, check=False).returncode == 0  # noqa: E731
        wait_until(gone, 20, "the disk is free")


@dataclass(frozen=True)
class Case:
    """An option, a process that reads it, and the check.

    `before` are options set before the check. `seen` performs it: it calls its second argument to change the option to
    `value`.
    """

    option: str
    reader: str
    value: Any
    seen: Callable[[FromFile, Callable[[], None]], None]
    before: dict[str, Any] = field(default_factory=dict)


def refused_by_its_size(group: FromFile, change: Callable[[], None]) -> None:
    with group.client() as client:
        client.send("T", b"x" * 5000)
        change()

        def refused() -> bool:
            with contextlib.suppress(MessageTooLargeError):
                client.send("T", b"x" * 5000)
                return False
            return True

        wait_until(refused, what="a refusal")


def flushed_often(group: FromFile, change: Callable[[], None]) -> None:
    passes = group.word("commitlog_passes")
    group.looked_on()
    assert group.word("commitlog_passes") <= passes + 1
    change()
    group.later("commitlog_passes", 10)


def deleted(group: FromFile, change: Callable[[], None]) -> None:
    """Segments are kept over several passes, then deleted."""
    minimum, last = group.word("min_physical_offset"), group.fill()
    group.later("retention_passes", 3)
    assert group.word("min_physical_offset") == minimum
    change()
    wait_until(lambda: group.word("min_physical_offset") > minimum, what="the log's minimum moves")
    if group.options["delete_when"] == ALL_HOURS:
        wait_until(lambda: group.word("min_physical_offset") == last, what="all that has expired is gone")


def looks_often(group: FromFile, change: Callable[[], None]) -> None:
    group.looked_on()
    passes = group.word("retention_passes")
    group.looked_on()
    assert group.word("retention_passes") == passes
    change()
    group.later("retention_passes", 5)


def refuses_for_the_disk(group: FromFile, change: Callable[[], None]) -> None:
    group.looked_on()
    assert group.word("disk_full") == 0
    change()
    wait_until(lambda: group.word("disk_full") == 1, what="the disk is called full")


def needed_bytes(group: FromFile) -> int:
    """The required free space in the error of a refused send."""
    with group.client(retry=NO_RETRY) as client, pytest.raises(DiskFullError) as refused:
        client.send("T", b"x")
    needed = re.match(r"disk nearly full: ([\d,]+) bytes must be free", str(refused.value))
    assert needed is not None, refused.value
    return int(needed[1].replace(",", ""))


def floor_used_by_the_writer(group: FromFile, change: Callable[[], None]) -> None:
    group.change(disk_floor_bytes=1 << 40)
    wait_until(lambda: group.word("disk_full") == 1, what="the disk is called full")
    assert needed_bytes(group) == (1 << 40) + 2 * SEGMENT
    change()
    wait_until(lambda: needed_bytes(group) == (1 << 41) + 2 * SEGMENT, what="more must be free")


def used_by_the_writer(group: FromFile, change: Callable[[], None]) -> None:
    def percent(share: int) -> int:
        return share * (group.word("disk_used_bytes") + group.word("disk_free_bytes")) // 100

    group.change(disk_space_warning_level_ratio=40)
    wait_until(lambda: group.word("disk_full") == 1, what="the disk is called full")
    wait_until(lambda: needed_bytes(group) == percent(60), what="the required free space")
    change()
    wait_until(lambda: needed_bytes(group) == percent(64), what="more must be free")


def deleted_together(group: FromFile, change: Callable[[], None]) -> None:
    """At first one segment per pass, then several."""
    group.fill()
    passes, segments = group.word("retention_passes"), group.word("retention_segments")
    group.change(delete_when=ALL_HOURS)
    group.later("retention_segments", 2)
    assert group.word("retention_segments") - segments <= group.word("retention_passes") - passes + 1
    change()
    group.later("retention_segments", 1)  # The new value is used from here.
    group.change(delete_when=NOT_NOW)
    last = group.fill()
    seen: list[tuple[int, int]] = []

    def together() -> bool:
        """True if more segments were deleted between two checks than the keeper made passes."""
        passes, segments = group.word("retention_passes"), group.word("retention_segments")
        now = group.word("retention_passes")
        found = any(segments - segments_then > now - passes_then + 1 for passes_then, segments_then in seen)
        seen.append((passes, segments))
        return found

    assert not together()
    group.change(delete_when=ALL_HOURS)
    wait_until(together, what="several segments go at one look")
    wait_until(lambda: group.word("min_physical_offset") == last, what="all that has expired is gone")


def segments_without_pause(group: FromFile, change: Callable[[], None]) -> None:
    last, segments = group.fill(), group.word("retention_segments")
    group.change(delete_when=ALL_HOURS)
    wait_until(lambda: group.word("retention_segments") > segments, what="a segment is deleted")
    group.looked_on()
    assert group.word("retention_segments") == segments + 1
    change()
    oldest: Callable[[], int] = lambda: min(int(path.name) for path in group.paths.commit_log.glob("0*"))  # noqa: E731
    wait_until(lambda: oldest() == last, what="all that has expired is gone")


def queues_without_pause(group: FromFile, change: Callable[[], None]) -> None:
    oldest: Callable[[], list[int]] = lambda: [  # noqa: E731
        min(int(path.name) for path in group.paths.consume_queue.joinpath("T", queue).iterdir()) for queue in "01"
    ]
    group.fill()
    before = oldest()
    moved: Callable[[], int] = lambda: sum(map(int.__gt__, oldest(), before))  # noqa: E731
    group.change(delete_when=ALL_HOURS)
    wait_until(lambda: moved() == 1, what="one queue's files are deleted")
    group.looked_on()
    assert moved() == 1
    change()
    wait_until(lambda: moved() == 2, what="both queues' files are deleted")


def kept_for_a_group(group: FromFile, change: Callable[[], None]) -> None:
    minimum, last = group.word("min_physical_offset"), group.fill()
    with group.client() as client:
        first = next(queue for queue in client.queues() if (queue.topic, queue.queue_id) == ("T", 0)).min_offset
        client.groups.commit("slow", "T", 0, first)
    group.change(delete_when=ALL_HOURS)
    wait_until(lambda: group.word("retention_held_by") == words_of.HELD_GROUP, what="segments held by a group")
    assert group.word("min_physical_offset") == minimum
    change()
    wait_until(lambda: group.word("min_physical_offset") == last, what="deletion of messages not consumed")


def transaction_given_up(group: FromFile, change: Callable[[], None]) -> None:
    discards = group.word("transaction_discards")
    with group.client() as client:
        open_transaction(client, GROUP, Message("T", b"half"))
    group.later("transaction_checks", 3)
    assert group.word("transaction_discards") == discards
    change()
    group.later("transaction_discards", 1)


def shown_by_the_page(name: str, value: float) -> Callable[[FromFile, Callable[[], None]], None]:
    def seen(group: FromFile, change: Callable[[], None]) -> None:
        url = f"http://127.0.0.1:{wait_until(lambda: group.word('monitor_port'))}/events"
        with urllib.request.urlopen(url, timeout=20) as events:
            values: Iterator[float] = (
                json.loads(line[6:])["disk"][name] for line in events if line.startswith(b"data: ")
            )
            assert next(values) != value
            change()
            wait_until(lambda: next(values) == value, what=f"{name} = {value}")

    return seen


def shown_to_prometheus(limit: str, value: float) -> Callable[[FromFile, Callable[[], None]], None]:
    def seen(group: FromFile, change: Callable[[], None]) -> None:
        url = f"http://127.0.0.1:{wait_until(lambda: group.word('monitor_port'))}/metrics"

        def exported() -> float:
            with urllib.request.urlopen(url, timeout=20) as answer:
                text = answer.read().decode()
            (found,) = re.findall(rf'^mqproc_disk_limit_ratio{{[^}}]*limit="{limit}"[^}}]*}} (\S+)$', text, re.M)
            return float(found)

        assert exported() != value
        change()
        wait_until(lambda: exported() == value, what=f"{limit} = {value}")

    return seen


def served_by_name(group: FromFile, change: Callable[[], None]) -> None:
    url = f"http://127.0.0.1:{wait_until(lambda: group.word('monitor_port'))}/healthz"

    def is_served() -> bool:
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(urllib.request.Request(url, headers={"Host": "mq.example"}), timeout=20).close()
            return True
        return False

    assert not is_served()
    change()
    wait_until(is_served, what="an answer for the host name")


def shown_by_top(name: str, value: float) -> Callable[[FromFile, Callable[[], None]], None]:
    def seen(group: FromFile, change: Callable[[], None]) -> None:
        source = SnapshotSource(group.paths, lambda: read_settings(StoreIO(), group.paths))
        with contextlib.closing(source):
            assert source.read()["disk"][name] != value
            change()
            assert source.read()["disk"][name] == value

    return seen


EXPIRED = {"file_reserved_time": 0}
DUE = EXPIRED | {"delete_when": ALL_HOURS}
CASES = [
    Case("max_message_size", words_of.WRITER, 2000, refused_by_its_size),
    Case(
        "flush_interval_commit_log", words_of.COMMITLOG_FLUSHER, 20, flushed_often,
        {"flush_interval_commit_log": ONE_MINUTE},
    ),
    Case("file_reserved_time", words_of.KEEPER, 0, deleted, {"delete_when": ALL_HOURS}),
    Case("file_reserved_time", words_of.QUERY, 0, transaction_given_up),
    Case("delete_when", words_of.KEEPER, ALL_HOURS, deleted, EXPIRED),
    Case("disk_max_used_space_ratio", words_of.KEEPER, 10, deleted, EXPIRED),
    Case("disk_space_clean_forcibly_ratio", words_of.KEEPER, 10, deleted, {"clean_file_forcibly_enable": True}),
    Case("clean_file_forcibly_enable", words_of.KEEPER, True, deleted, {"disk_space_clean_forcibly_ratio": 10}),
    Case("disk_space_warning_level_ratio", words_of.KEEPER, 40, refuses_for_the_disk),
    Case("disk_space_warning_level_ratio", words_of.WRITER, 36, used_by_the_writer),
    Case("disk_floor_bytes", words_of.KEEPER, 1 << 40, refuses_for_the_disk),
    Case("disk_floor_bytes", words_of.WRITER, 1 << 41, floor_used_by_the_writer),
    Case("retention_guard", words_of.KEEPER, "none", kept_for_a_group, EXPIRED | {"retention_guard": "groups"}),
    Case("clean_resource_interval", words_of.KEEPER, 50, looks_often, {"clean_resource_interval": 3_600_000}),
    Case(
        "delete_file_batch_max", words_of.KEEPER, 100, deleted_together,
        EXPIRED | {"delete_file_batch_max": 1, "clean_resource_interval": 1000},
    ),
    Case(
        "delete_commit_log_files_interval", words_of.KEEPER, 0, segments_without_pause,
        EXPIRED | {"delete_commit_log_files_interval": ONE_MINUTE},
    ),
    Case(
        "delete_consume_queue_files_interval", words_of.KEEPER, 0, queues_without_pause,
        EXPIRED | {"delete_consume_queue_files_interval": ONE_MINUTE},
    ),
    Case("metrics_allowed_hosts", words_of.MONITOR, "mq.example", served_by_name),
    Case("disk_space_clean_forcibly_ratio", words_of.MONITOR, 84, shown_to_prometheus("delete_any_age", 0.84)),
    *(
        Case(option, reader, value, by(name, shown))
        for option, value, name, shown in (
            ("file_reserved_time", 24, "reserved_hours", 24),
            ("disk_max_used_space_ratio", 61, "clean_ratio", 0.61),
            ("disk_space_warning_level_ratio", 97, "warning_ratio", 0.97),
        )
        for reader, by in ((words_of.MONITOR, shown_by_the_page), (TOP, shown_by_top))
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.option} {case.reader}")
def test_reload_reaches_every_reader_of_option(group: FromFile, case: Case) -> None:
    group.change(**START | {"delete_file_batch_max": 10, "retention_guard": "none"})
    # When the first of these ends, a pass that began with the previous options is over.
    group.later("retention_passes", 2)
    if case.before:
        group.change(**case.before)
    wait_until(lambda: group.word("disk_full") == 0, what="room")
    reports: list[str] = []
    case.seen(group, lambda: reports.append(group.change(**{case.option: case.value})))
    assert f"options reloaded: {case.option} = {case.value}" in reports[0]
    assert "restart" not in reports[0]


def test_reload_names_options_that_need_restart(group: FromFile) -> None:
    group.change(**START)
    report = group.change(max_queues=128, max_connections=77, max_message_size=40_000)
    assert "max_message_size = 40000; a restart of the group is needed for max_queues, max_connections" in report
    found = read_settings(StoreIO(), group.paths)
    assert (found.max_queues, found.max_message_size) == (START["max_queues"], 40_000)
    report = group.change(**START | {"max_connections": FIELDS["max_connections"].default})
    assert "restart" not in report


def test_reload_every_option_has_a_case_per_reader() -> None:
    may_change = {name for name, option in FIELDS.items() if option.metadata["reload"]}
    readers = {(name, reader) for name, module in reads(may_change) for reader in READERS[module]}
    assert {name for name, _ in readers} == may_change
    assert {(case.option, case.reader) for case in CASES} == readers


def reads(names: set[str]) -> Iterator[tuple[str, str]]:
    """(option, module) for each option that a module of the group reads, without the CLI."""
    package = ROOT / "mqproc"
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).as_posix()
        if not module.startswith(("cli/", "supervisor/", "config/")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and node.attr in names:
                    yield node.attr, module
                elif isinstance(node, ast.Attribute) and node.attr == Options.disk_refusal.__name__:
                    yield from ((name, module) for name in ("disk_space_warning_level_ratio", "disk_floor_bytes"))
