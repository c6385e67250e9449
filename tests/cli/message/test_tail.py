"""`mqproc tail`: damage is reported once on stderr; --follow follows queues and topics."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from mqproc import Message
from mqproc.cli.message.tail import POLL_S
from tests.support.command_line import Outcome, call
from tests.support.group import Group, wait_until
from tests.support.store_checks import flip, overwrite

MESSAGE = (
    ("message", "range", "orders"),
    ("message", "range", "orders", "--count"),
    ("message", "key", "orders", "k"),
    ("message", "scan", "--topic", "orders"),
)


def test_damage_is_skipped_and_reported_once(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with group.client() as client:
        client.create_topic("orders", 2)
        messages = [Message("orders", b"%03d" % number, queue_id=number % 2, keys=("k",)) for number in range(60)]
        sent = [client.send(message) for message in messages]
        client.wait_dispatched()
    for command in MESSAGE:
        assert call(*command, "--store", group.store).err == ""
    assert group.stop() == 0
    offsets = [each.physical_offset for each in sent]
    log = group.store / "commitlog" / f"{0:020d}"
    flip(log, offsets[7] + 90)
    overwrite(log, offsets[20], b"x" * (offsets[30] - offsets[20]))
    for mark in group.paths.marks.iterdir():
        mark.unlink()
    make_group()
    arguments = ("tail", "orders", "--store", group.store, "--from", "beginning", "--format", "%s ")
    outcome = call(*arguments)
    assert outcome.code == 0
    assert outcome.out.split() == [f"{number:03d}" for number in range(60) if number != 7 and not 20 <= number < 30]
    reported = outcome.err.splitlines()
    assert len(reported) == 2
    assert reported[0].startswith("damage: orders queue 1: queue offsets [3, 4) have no intact record: log ")
    assert f"log [{offsets[7]}, {offsets[8]}): " in reported[0]
    assert f"log [{offsets[20]}, {offsets[30]}): " in reported[1]
    assert call(*arguments, "--queue", 0).err.count("\n") == 1
    assert call(*arguments, "-n", 5).err == ""
    for command in MESSAGE:
        found = call(*command, "--store", group.store)
        assert found.code == 0
        reported = "damage: the log has 2 damaged ranges; messages in them cannot be read; "
        assert found.err == f"{reported}mqproc store info lists them\n"


# --follow


@contextmanager
def _tail(group: Group, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`mqproc tail watched -f` of a topic with one queue, once it waits for messages."""
    with group.client() as client:
        client.create_topic("watched", 1)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MQPROC_")}
    command = [sys.executable, "-m", "mqproc", "tail", "watched", "-f", "--format", "%s\\n", *arguments]
    with subprocess.Popen(
        [*command, "--store", str(group.store)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as child:
        try:
            wait_until(lambda: _waiting_pulls(group) >= 1, what="a pull that waits")
            yield child
        finally:
            child.kill()


def _waiting_pulls(group: Group) -> int:
    return int(call("stat", "--json", "--store", group.store).json["words"]["waiting_pulls"])


def test_follow_reads_added_queues_from_the_beginning(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with group.client() as client, _tail(group, "-n", "4") as child:
        client.create_topic("watched", 3)
        for queue_id in (2, 1, 0, 2):
            client.send("watched", b"to %d" % queue_id, queue_id=queue_id)
        out, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    assert sorted(out.splitlines()) == ["to 0", "to 1", "to 2", "to 2"]


def test_follow_reads_only_named_queues(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with group.client() as client, _tail(group, "-n", "1", "--queue", "0") as child:
        client.create_topic("watched", 2)
        client.send("watched", b"not asked for", queue_id=1)
        client.send("watched", b"asked for", queue_id=0)
        out, _ = child.communicate(timeout=60)
    assert out == "asked for\n"


@pytest.mark.parametrize("flags", [(), ("--queue", "0")])
def test_follow_continues_after_topic_is_recreated(make_group: Callable[..., Group], flags: tuple[str, ...]) -> None:
    group = make_group()
    with group.client() as client, _tail(group, "-n", "1", *flags) as child:
        client.delete_topic("watched")
        assert child.stderr is not None
        assert child.stderr.readline() == "topic watched was deleted; waiting for it to be created again\n"
        client.create_topic("watched", 1)
        client.send("watched", b"again")
        out, err = child.communicate(timeout=60)
    assert (out, err) == ("again\n", "")


def test_follow_polls_deleted_topic_slowly(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with group.client() as client:
        client.create_topic("watched", 1)
        client.send("watched", b"before")
        client.wait_dispatched()
        with _tail(group) as child:
            client.delete_topic("watched")
            assert child.stderr is not None
            child.stderr.readline()
            began_s, before = time.monotonic(), client.stats()["pulls"]
            wait_until(lambda: client.stats()["pulls"] >= before + 5)
            more = client.stats()["pulls"] - before
            assert time.monotonic() - began_s >= (more - 1) * POLL_S


def test_follow_ends_at_timeout(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with group.client() as client:
        client.create_topic("watched", 1)
        client.send("watched", b"before")
        client.wait_dispatched()
    arguments = ("tail", "watched", "--store", group.store, "-f", "--from", "beginning", "--format", "%s\\n")
    began_s = time.monotonic()
    outcome = call(*arguments, "--timeout", "1s")
    if not outcome.out:
        # The time that a busy machine stalls counts for the command, too.
        outcome = call(*arguments, "--timeout", "20s")
    assert outcome == Outcome(0, "before\n", "")
    assert time.monotonic() - began_s >= 1
    # As for every command that asks a group: no answer can arrive within no time.
    refused = call(*arguments, "--timeout", "0")
    assert (refused.code, "timeout = 0.0 is out of range" in refused.err) == (2, True)
