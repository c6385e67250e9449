"""Around damage every intact message is printed, and what is damaged is told once, on stderr."""

from __future__ import annotations

from collections.abc import Callable

from mqproc import Message
from tests.cli.calling import call
from tests.conftest import Group
from tests.store.verify.looking import flip, overwrite

MESSAGE = (
    ("message", "range", "orders"),
    ("message", "range", "orders", "--count"),
    ("message", "key", "orders", "k"),
    ("message", "scan", "--topic", "orders"),
)


def test_damage_is_stepped_over_and_told_once(make_group: Callable[..., Group]) -> None:
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
    told = outcome.err.splitlines()
    assert len(told) == 2
    assert told[0].startswith("damage: orders queue 1: queue offsets [3, 4) have no intact record: log ")
    assert f"log [{offsets[7]}, {offsets[8]}): " in told[0]
    assert f"log [{offsets[20]}, {offsets[30]}): " in told[1]
    assert call(*arguments, "--queue", 0).err.count("\n") == 1
    assert call(*arguments, "-n", 5).err == ""
    for command in MESSAGE:
        found = call(*command, "--store", group.store)
        assert found.code == 0
        told = "damage: the log has 2 damaged ranges; messages in them cannot be read; "
        assert found.err == f"{told}mqproc store info lists them\n"
