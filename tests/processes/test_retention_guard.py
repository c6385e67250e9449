"""`retention_guard = groups` retains received messages until they are acknowledged."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import pytest

from mqproc.cli.main import main
from mqproc.client import Client
from mqproc.client._sync.consumer import SimpleConsumer
from mqproc.layout.control import HELD_NAMES, QUERY
from tests.processes.test_retention import RETAINING, SEGMENT
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
