"""`retention_guard = groups` retains received messages until they are acknowledged."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc.cli.main import main
from mqproc.client import Client
from mqproc.client._sync.consumer import SimpleConsumer
from mqproc.config.options import Options, RetentionGuard
from mqproc.io.store_io import StoreIO
from mqproc.layout.control import HELD_NAMES, QUERY
from mqproc.paths import StorePaths
from mqproc.store.export import NewStore
from mqproc.store.recovery.recovery import adopt_sizes
from mqproc.store.recovery.store_files import mark_open
from tests.golden.fixtures import load_store
from tests.processes.test_retention import RETAINING, SEGMENT
from tests.support.command_line import call
from tests.support.group import PATIENCE_S, Group, wait_until

PASSES = 5


def fill(client: Client, consumer: SimpleConsumer, segments: int = 4) -> None:
    """Send this many segments of messages that are received and acknowledged at once."""
    left = 0
    for _ in range(segments * SEGMENT // 50_000):
        client.send_batch("T", [b"x" * 1000] * 50)
        left += 50
    while left:
        left -= consumer.ack(*consumer.receive(left, timeout=PATIENCE_S))


def pass_by(group: Group) -> dict[str, int]:
    """Wait for several more retention passes of the keeper."""
    passes = group.words()["retention_passes"] + PASSES
    wait_until(lambda: group.words()["retention_passes"] >= passes, what="retention passes")
    return group.words()


def held_by(words: dict[str, int]) -> str:
    return HELD_NAMES[words["retention_held_by"]]


def test_retention_keeps_unacknowledged_and_redelivered_messages(
    make_group: Callable[..., Group], capsys: pytest.CaptureFixture[str]
) -> None:
    group = make_group(**RETAINING, retention_guard="groups")
    with group.client(timeout=30) as client:
        for topic in ("T", "A"):
            client.create_topic(topic, 1)
            client.send(topic, b"first of " + topic.encode())
        audit = client.simple_consumer("audit", "A", start="earliest")
        assert len(audit.receive(1, 1, timeout=PATIENCE_S)) == 1
        wait_until(lambda: client.queues("%RETRY%audit_A"), what="a redelivery")
        billing = client.simple_consumer("billing", "T", start="earliest")
        (kept,) = billing.receive(1, 600, timeout=PATIENCE_S)
        fill(client, billing)
        # The marks protect it until they advance.
        wait_until(lambda: held_by(group.words()) == "received messages", what="held by received messages")
        words = pass_by(group)
        assert (held_by(words), words["min_physical_offset"]) == ("received messages", 0)
        os.kill(group.pid(QUERY), signal.SIGKILL)
        fill(client, billing)
        assert pass_by(group)["min_physical_offset"] == 0
    assert group.stop() == 0
    capsys.readouterr()
    assert main(["store", "retention", "--dry-run", "--store", str(group.store), "--output", "json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["held_by"], plan["min_physical_offset"]) == ("received messages", 0)
    group.start()
    with group.client(timeout=30) as client:
        billing = client.simple_consumer("billing", "T")
        assert billing.ack(kept) == 1
        wait_until(lambda: held_by(group.words()) == "consumer group", what="only redelivered messages are kept")
        assert pass_by(group)["min_physical_offset"] == 0
        audit = client.simple_consumer("audit", "A")
        (again,) = audit.receive(1, timeout=PATIENCE_S)
        assert again.body == b"first of A"
        assert audit.ack(again) == 1
        fill(client, billing)
        wait_until(lambda: group.words()["min_physical_offset"] > again.physical_offset, what="segments go")


FULL = {"disk_max_used_space_ratio": 1, "disk_space_clean_forcibly_ratio": 1}
"""The disk counts as full, so that segments of any age are deleted."""


def fill_unread(group: Group, segments: int = 4) -> None:
    """Send this many segments of messages to a group that has read none."""
    with group.client(timeout=30) as client:
        client.create_topic("T", 1)
        with client.consumer("billing", "T", start="earliest"):
            wait_until(lambda: client.groups.info("billing").queues, what="the group has offsets")
        for _ in range(segments * SEGMENT // 50_000):
            client.send_batch("T", [b"x" * 1000] * 50)


def test_new_store_on_a_full_disk_keeps_unconsumed_messages(make_group: Callable[..., Group]) -> None:
    group = make_group(**RETAINING, **FULL)
    fill_unread(group)
    wait_until(lambda: held_by(group.words()) == "consumer group", what="held by the group")
    assert pass_by(group)["min_physical_offset"] == 0
    assert call("status", "--store", group.store).code == 0
    with group.client(timeout=30) as client:
        client.groups.delete("billing")
    wait_until(lambda: group.words()["min_physical_offset"] > 0, what="segments go when no group needs them")
    assert group.words()["retention_unconsumed"] == 0


def test_deleted_unconsumed_messages_are_shown(make_group: Callable[..., Group]) -> None:
    group = make_group(**RETAINING, **FULL, retention_guard="none")
    fill_unread(group)
    lost = wait_until(lambda: group.words()["retention_unconsumed"], what="messages are deleted unconsumed")
    status = call("status", "--store", group.store)
    assert "that groups had not consumed: see retention_guard" in status.out
    assert status.code == 0
    port = wait_until(lambda: group.words()["monitor_port"], what="the monitor listens")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    (value,) = re.findall(r"^mqproc_unconsumed_messages_deleted_total ([\d.]+)$", text, re.MULTILINE)
    assert float(value) >= lost


@pytest.mark.parametrize(
    ("made_by", "guard"), [("mqproc", "groups"), ("rocketmq", "none"), ("export", "groups"), ("older mqproc", "groups")]
)
def test_retention_guard_follows_the_maker_of_the_store(tmp_path: Path, made_by: str, guard: str) -> None:
    paths, io = StorePaths(tmp_path / "store"), StoreIO()
    paths.own.mkdir(parents=True)
    if made_by == "export":
        NewStore(io, StorePaths(tmp_path / "copy"), Options())
        paths = StorePaths(tmp_path / "copy")
    elif made_by != "mqproc":
        paths.commit_log.mkdir()
    if made_by == "older mqproc":
        paths.opened.write_bytes(b'{"lock_mtime_ns":1}')
    for _start in range(2):
        assert adopt_sizes(io, paths, Options(), print).retention_guard == guard
        explicit = Options(retention_guard=RetentionGuard.NONE)
        assert adopt_sizes(io, paths, explicit, print).retention_guard is RetentionGuard.NONE
        mark_open(io, paths, print)
        paths.commit_log.mkdir(exist_ok=True)


def test_running_store_of_rocketmq_has_no_guard(tmp_path: Path, make_group: Callable[..., Group]) -> None:
    load_store("a_basic", tmp_path / "golden").rename(tmp_path / "store")
    group = make_group()
    assert json.loads(group.paths.settings.read_bytes())["retention_guard"] == "none"
    assert group.stop() == 0
    group.start()
    assert json.loads(group.paths.settings.read_bytes())["retention_guard"] == "none"


def test_running_new_store_has_the_guard(make_group: Callable[..., Group]) -> None:
    group = make_group()
    assert json.loads(group.paths.settings.read_bytes())["retention_guard"] == "groups"
    assert group.stop() == 0
    group.start()
    assert json.loads(group.paths.settings.read_bytes())["retention_guard"] == "groups"


@pytest.mark.parametrize("damage", [b"", b"{}", b"\0" * 20, b'{"made_by_rocketmq": "x"}', None])
def test_retention_guard_of_a_store_without_readable_note_is_kept(
    make_group: Callable[..., Group], damage: bytes | None
) -> None:
    group = make_group()
    with group.client() as client:
        client.send("orders", b"x")
    group.stop()
    assert call("status", "--store", group.store).code != 0
    group.paths.opened.unlink() if damage is None else group.paths.opened.write_bytes(damage)
    group.start()
    assert json.loads(group.paths.settings.read_text())["retention_guard"] == "groups"
    assert "retention_guard: groups: " in group.output.read_text()
    degraded = call("status", "--store", group.store)
    assert degraded.code == 1
    assert "opened.json, which names the store's maker: it was lost or unreadable at the start" in degraded.out
    # Damaged while the group runs.
    group.paths.opened.write_bytes(b"garbage")
    assert "opened.json, which names the store's maker: " in call("status", "--store", group.store).out
    group.stop()
    group.start()
    group.stop()
    group.start()
    assert call("status", "--store", group.store).code == 0
    assert json.loads(group.paths.settings.read_text())["retention_guard"] == "groups"


def test_retention_guard_of_rocketmq_store_with_lost_note_is_groups(tmp_path: Path) -> None:
    paths, io = StorePaths(tmp_path / "store"), StoreIO()
    paths.own.mkdir(parents=True)
    paths.commit_log.mkdir()
    mark_open(io, paths, print)
    assert adopt_sizes(io, paths, Options(), print).retention_guard is RetentionGuard.NONE
    paths.marks.mkdir()
    paths.opened.unlink()
    assert adopt_sizes(io, paths, Options(), print).retention_guard is RetentionGuard.GROUPS
