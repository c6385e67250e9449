"""Retention under load: sends and pulls continue, minima are valid, killed keepers resume.

Segments are small and nothing is retained for a minimum time, so every segment is deleted as soon as its marks allow
it. Two client processes send continuously; this one checks the minima, follows a queue, and kills roles.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqproc.client import Client
from mqproc.config.parse import load_options
from mqproc.errors import MqprocError, SendOutcomeUnknownError
from mqproc.io.store_io import StoreIO
from mqproc.layout import control as words_of
from mqproc.store.read.reader import StoreReader
from mqproc.store.retention import plan as retention_request
from mqproc.store.verify import verify_store
from mqproc.types import PullStatus, QueueInfo
from tests.support.group import Group, rebuilt, wait_until
from tests.support.processes import loaded_context
from tests.support.store_builders import ALL_HOURS

SEGMENT = 65536
QUEUES = 3
SENDERS = 2
RETAINING: dict[str, Any] = {
    "mapped_file_size_commit_log": SEGMENT,
    "mapped_file_size_consume_queue": 2000,
    "max_hash_slot_num": 200,
    "max_index_num": 800,
    "max_message_size": 30_000,
    "file_reserved_time": 0,
    "delete_when": ALL_HOURS,
    "clean_resource_interval": 100,
    "delete_commit_log_files_interval": 1,
    "delete_consume_queue_files_interval": 1,
    # Marks advance quickly, and deletion follows them.
    "flush_interval_commit_log": 20,
    "flush_commit_log_thorough_interval": 50,
    "flush_interval_consume_queue": 50,
    "flush_consume_queue_thorough_interval": 100,
}
Place = tuple[int, int, int]


def send_until_told(store: str, number: int, stop: Any, report: str) -> None:
    """A client process: send batches and single messages; record the acknowledged ones."""
    acknowledged: list[tuple[str, int, int, int]] = []
    unknown: list[str] = []
    refused = 0
    sequence = 0
    with Client(store, timeout=20.0) as client:
        while not stop.is_set():
            names = [f"{number}-{sequence + each}" for each in range(20)]
            sequence += len(names)
            bodies = [name.encode().ljust(200, b".") for name in names]
            try:
                told = client.send_batch("T", bodies, keys=names)
                columns = (told.queue_ids.tolist(), told.queue_offsets.tolist(), told.physical_offsets.tolist())
                acknowledged += list(zip(names, *columns, strict=True))
                sent = client.send("T", f"{number}-s{sequence}".encode())
                acknowledged.append((f"{number}-s{sequence}", sent.queue_id, sent.queue_offset, sent.physical_offset))
            except SendOutcomeUnknownError:
                unknown += [*names, f"{number}-s{sequence}"]
            except MqprocError:
                refused += 1
    Path(report).write_text(json.dumps([acknowledged, unknown, refused]))


class Load:
    """Running client processes that send."""

    def __init__(self, group: Group, folder: Path) -> None:
        context = loaded_context()
        self.stop = context.Event()
        self.reports = [folder / f"sender{number}.json" for number in range(SENDERS)]
        self.processes = [
            context.Process(
                target=send_until_told, args=(str(group.store), number, self.stop, str(report)), daemon=True
            )
            for number, report in enumerate(self.reports)
        ]
        for process in self.processes:
            process.start()

    def finish(self) -> tuple[dict[str, Place], set[str], int]:
        """(acknowledged places by name, names of unknown outcome, refusals)."""
        self.stop.set()
        for process in self.processes:
            process.join(60)
            assert process.exitcode == 0
        acknowledged: dict[str, Place] = {}
        unknown: set[str] = set()
        refused = 0
        for report in self.reports:
            told, lost, count = json.loads(report.read_text())
            acknowledged |= {name: (queue_id, offset, physical) for name, queue_id, offset, physical in told}
            unknown |= set(lost)
            refused += count
        return acknowledged, unknown, refused


class Follower:
    """Read one queue from its current offset like a consumer; skip and report deleted messages."""

    def __init__(self, client: Client, queue_id: int) -> None:
        self._client = client
        self._queue_id = queue_id
        self.offset = 0
        self.read = 0
        self.skipped = 0

    def step(self) -> None:
        pulled = self._client.pull("T", self._queue_id, self.offset, max_messages=50)
        if pulled.status is PullStatus.FOUND:
            offsets = [message.queue_offset for message in pulled.messages]
            assert offsets == list(range(self.offset, self.offset + len(offsets))), (self.offset, offsets[:3])
            self.read += len(offsets)
        elif pulled.status is PullStatus.OFFSET_TOO_SMALL:
            assert pulled.next_offset == pulled.min_offset > self.offset
            self.skipped += pulled.next_offset - self.offset
        else:
            assert pulled.status in (PullStatus.OFFSET_OVERFLOW_ONE, PullStatus.NO_MESSAGE_IN_QUEUE), pulled
        assert pulled.next_offset >= self.offset
        self.offset = pulled.next_offset


def check_minimum(client: Client, queue: QueueInfo) -> None:
    """A queue's minimum points to a stored message, unless it has moved meanwhile."""
    pulled = client.pull("T", queue.queue_id, queue.min_offset, max_messages=3)
    if pulled.status is PullStatus.FOUND:
        assert pulled.messages[0].queue_offset == queue.min_offset
    elif pulled.status is PullStatus.OFFSET_TOO_SMALL:
        assert pulled.next_offset == pulled.min_offset > queue.min_offset
    else:
        assert pulled.status in (PullStatus.OFFSET_OVERFLOW_ONE, PullStatus.NO_MESSAGE_IN_QUEUE), pulled
    if queue.min_offset > 0:
        below = client.pull("T", queue.queue_id, queue.min_offset - 1)
        assert (below.status, below.next_offset) == (PullStatus.OFFSET_TOO_SMALL, below.min_offset)
        assert below.min_offset >= queue.min_offset


def look_until(group: Group, client: Client, reached: Callable[[dict[str, int]], bool]) -> list[Follower]:
    """Check minima and follow the queues until enough has been deleted."""
    followers = [Follower(client, queue_id) for queue_id in range(QUEUES)]

    def step() -> bool:
        for queue in client.queues("T"):
            check_minimum(client, queue)
        for follower in followers:
            follower.step()
        return reached(group.words())

    wait_until(step, 60, "deletions")
    return followers


def check_all(group: Group, acknowledged: dict[str, Place], unknown: set[str]) -> None:
    """Check that each acknowledged message that was not deleted is stored once at its offset.

    Queues must equal a rebuild.
    """
    assert group.stop() == 0
    begin = min(int(path.name) for path in group.paths.commit_log.iterdir())
    with StoreReader(group.store) as reader:
        found = {message.body.decode().rstrip("."): place_of(message) for message in reader.messages("T")}
        bounds = {(queue.topic, queue.queue_id): (queue.min_offset, queue.max_offset) for queue in reader.queues()}
    kept = {name: place for name, place in acknowledged.items() if place[2] >= begin}
    assert kept
    assert {name: found[name] for name in kept if name in found} == kept
    assert set(found) - set(kept) <= unknown
    with StoreReader(rebuilt(group).root) as reader:
        again = {message.body.decode().rstrip("."): place_of(message) for message in reader.messages("T")}
        rebuilt_bounds = {queue: ends for queue, ends in bounds.items() if ends[0] < ends[1]}
        theirs = {(queue.topic, queue.queue_id): (queue.min_offset, queue.max_offset) for queue in reader.queues()}
    assert again == found
    assert {queue: theirs[queue] for queue in rebuilt_bounds} == rebuilt_bounds


def place_of(message: Any) -> Place:
    return message.queue_id, message.queue_offset, message.physical_offset


@pytest.fixture
def group(make_group: Callable[..., Group]) -> Group:
    group = make_group(**RETAINING)
    with group.client() as client:
        client.create_topic("T", QUEUES)
    return group


def test_retention_sends_and_pulls_continue_during_deletion(group: Group, tmp_path: Path) -> None:
    load = Load(group, tmp_path)
    with group.client() as client:
        followers = look_until(
            group,
            client,
            lambda words: (
                words["retention_segments"] >= 60
                and words["retention_queue_files"] >= 20
                and words["retention_index_files"] >= 10
            ),
        )
    acknowledged, unknown, refused = load.finish()
    assert refused == 0
    assert not unknown
    assert sum(follower.read for follower in followers) > 0
    words = group.words()
    assert words["retention_errno"] == 0
    assert all(words[f"{role}.restarts"] == 0 for role in words_of.ROLES)
    # No role keeps deleted files open.
    wait_until(lambda: not deleted_in_use(group), what="deleted files let go")
    wait_until(lambda: group.words()["retention_pending_bytes"] == 0, what="space given back")
    check_all(group, acknowledged, unknown)


def deleted_in_use(group: Group) -> list[str]:
    """Deleted segments, queue and index files that a role has open or mapped."""
    found: list[str] = []
    for role in words_of.ROLES:
        process = Path(f"/proc/{group.words()[f'{role}.pid']}")
        try:
            names = [os.readlink(fd) for fd in (process / "fd").iterdir()]
            names += [line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()]
        except FileNotFoundError:
            continue
        folders = ("commitlog", "consumequeue", "index")
        ours = [name for name in names if any(f"{group.store}/{folder}/" in name for folder in folders)]
        found += [f"{role}: {name}" for name in ours if name.endswith("(deleted)")]
    return found


def test_retention_repeatedly_killed_keeper_leaves_valid_store(group: Group, tmp_path: Path) -> None:
    load = Load(group, tmp_path)
    wait_until(lambda: group.words()["retention_segments"] > 5, what="deletions")
    with group.client() as client:
        for _ in range(3):
            words = group.words()
            os.kill(words["keeper.pid"], signal.SIGKILL)
            before = words["retention_segments"]
            look_until(
                group,
                client,
                lambda now, before=before, incarnation=words["keeper.incarnation"]: (
                    now["keeper.incarnation"] > incarnation and now["retention_segments"] > before + 10
                ),
            )
    acknowledged, unknown, refused = load.finish()
    assert refused == 0
    words = group.words()
    assert words["keeper.restarts"] == 3
    wait_until(lambda: group.words()["min_physical_offset"] == min(segment_starts(group)), what="all below deleted")
    check_all(group, acknowledged, unknown)


def test_retention_stop_during_deletion_is_clean(make_group: Callable[..., Group]) -> None:
    another_hour = str((datetime.datetime.now().hour + 12) % 24)
    slow = {"delete_when": another_hour, "delete_commit_log_files_interval": 60_000}
    group = make_group(**RETAINING | slow)
    with group.client() as client:
        client.create_topic("T", 1)
        for _ in range(10):
            client.send_batch("T", [b"x" * 1000] * 100)
        client.wait_dispatched()
    # `query` updates `received_from` once a second; until then deletion is held back.
    marks = ("commitlog_mark", "cq_synced", "index_synced", "received_from")
    wait_until(lambda: all(group.words()[mark] == group.words()["written"] for mark in marks), what="no limit")
    retention_request.submit_request(StoreIO(), group.paths, 0)
    wait_until(lambda: group.words()["retention_segments"] == 1, what="the first segment is gone")
    minimum = group.words()["min_physical_offset"]
    assert min(segment_starts(group)) < minimum
    assert group.stop() == 0
    assert min(segment_starts(group)) == group.words()["min_physical_offset"] == minimum
    options = load_options(flags=[f"{name}={value}" for name, value in group.options.items()], environment={})
    verified = verify_store(StoreIO(), group.paths, options, jobs=1)
    assert verified.clean, verified.findings.in_order()


def segment_starts(group: Group) -> list[int]:
    return [int(path.name) for path in group.paths.commit_log.iterdir() if path.name.isdigit()]


def test_retention_group_killed_during_deletion_recovers(group: Group, tmp_path: Path) -> None:
    load = Load(group, tmp_path)
    wait_until(lambda: group.words()["retention_segments"] > 20, what="deletions")
    load.stop.set()
    group.kill()
    acknowledged, unknown, _refused = load.finish()
    group.start()
    group.wait_dispatched()
    with group.client() as client:
        for queue in client.queues("T"):
            check_minimum(client, queue)
    assert group.words()["damage_holes"] == 0
    check_all(group, acknowledged, unknown)


def test_retention_expired_queue_keeps_its_offsets(group: Group) -> None:
    with group.client() as client:
        client.create_topic("quiet", 1)
    for number in range(3):
        send_next(group, number)
    wait_until_expired(group, 3)
    assert group.stop() == 0
    group.start()
    send_next(group, 3)
    wait_until_expired(group, 4)
    group.kill()
    group.start()
    send_next(group, 4)
    wait_until_expired(group, 5)
    assert group.stop() == 0
    # The queue's folder is lost: a queue rebuilt from the log would begin at 0.
    shutil.rmtree(group.paths.consume_queue)
    group.start()
    send_next(group, 5)


def send_next(group: Group, offset: int) -> None:
    with group.client() as client:
        assert client.send("quiet", b"next").queue_offset == offset


def wait_until_expired(group: Group, end: int) -> None:
    """Fill the log until no message or file of the quiet queue is left."""
    written = group.words()["written"]
    with group.client() as client:
        for _ in range(6):
            client.send_batch("T", [b"x" * 1000] * 50)
        wait_until(lambda: min(segment_starts(group)) >= written - written % SEGMENT + SEGMENT, 60, "expiry")
        (queue,) = client.queues("quiet")
        assert (queue.min_offset, queue.max_offset) == (end, end)


def test_retention_space_is_freed_after_slow_reader(group: Group) -> None:
    with group.client() as client:
        client.send_batch("T", [b"first" * 100] * 10, queue_id=0)
        group.wait_dispatched()
        reader = StoreReader(group.store)
        first = reader.pull("T", 0, 0)
        view = reader.reading.segments.view(0)
        for _ in range(20):
            client.send_batch("T", [b"x" * 1000] * 50)
        wait_until(lambda: group.words()["min_physical_offset"] > 0, 60, "first segment gone")
    # The client continues in its own map, and learns the minimum with its next request.
    assert bytes(view[: len(first.messages[0].body) + 200]).count(b"first") > 50
    again = reader.pull("T", 0, 0)
    assert again.status is PullStatus.OFFSET_TOO_SMALL
    assert reader.pull("T", 0, again.next_offset).status in (PullStatus.FOUND, PullStatus.OFFSET_OVERFLOW_ONE)
    reader.close()
