"""Redeliveries of simple consumers move to members; a failure in one group affects no other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from mqproc import TooManyQueuesError
from tests.processes.test_simple_consumers import PATIENCE_S, fill
from tests.support.group import Group, wait_until


def test_pop_migration_failure_blocks_no_other_group(make_group: Callable[..., Group]) -> None:
    """The queue table has no space for one group's retry topic; the other group's topic exists."""
    group = make_group(max_queues=64)
    with group.client() as client:
        fill(client, "T", 1, queues=1)
        fill(client, "N", 1, queues=1)
        with client.consumer("other", "N", start="earliest") as member:
            member.nack(*member.receive(1, timeout=PATIENCE_S), delay_level=1)
        wait_until(lambda: any(each.max_offset for each in client.queues("%RETRY%other")), what="the retry of one")
        for name, first in (("full", "T"), ("other", "%RETRY%other")):
            consumer = client.simple_consumer(name, "T", start="earliest")
            topics = [each.stored_topic for each in consumer.receive(1, 1.0, timeout=PATIENCE_S)]
            assert topics == [first]
            while "T" not in topics:
                topics += [each.stored_topic for each in consumer.receive(1, 1.0, timeout=PATIENCE_S)]
        wait_until(lambda: client.queues("%RETRY%full_T") and client.queues("%RETRY%other_T"), what="copies")
        with contextlib.suppress(TooManyQueuesError):
            for number in range(64):
                client.create_topic(f"filler-{number}", 1)
        with client.consumer("full", "T") as full, client.consumer("other", "T") as member:
            assert full.receive(1, timeout=3) == []
            came: set[str] = set()
            while "T" not in came:
                messages = member.receive(2, timeout=PATIENCE_S)
                assert messages, "redelivered to the simple consumer"
                came |= {each.properties["RETRY_TOPIC"] for each in messages}
