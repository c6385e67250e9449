"""What must be true of a store after an outage, asked of the running group and of its files."""

from __future__ import annotations

import math
from collections.abc import Collection

from mqproc.config.options import Options
from mqproc.errors import GroupNotFoundError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.bell import semaphore_names
from mqproc.store.verify import verify_store
from tests.conftest import SMALL
from tests.outages.customers import GROUP, TOPICS, Heard, Place
from tests.outages.warm_group import WarmGroup
from tests.processes.rebuild import assert_equals_rebuild

NAMED = 5
"""Of what is wrong, so many are named."""


def check(group: WarmGroup, heard: Heard) -> None:
    """All that was told is where it was told to be, once, unless deleted or lost; nothing else is there.

    What a power cut has taken are the last messages, and they do not come back. A crash is not taken for damage, and no
    group is ahead of its queues. Nothing may be appended since the start.
    """
    group.wait_dispatched()
    words = group.words()
    assert words["damage_holes"] == words["dispatch_holes"] == 0, "a crash was taken for damage"
    found, minima = _found(group)
    missing = {
        name: place.physical_offset
        for name, place in heard.told.items()
        if name not in found and name not in heard.lost and place.queue_offset >= minima.get(place[:2], 0)
    }
    lost = {name: at for name, at in missing.items() if at >= heard.durable}
    _none(missing.keys() - lost.keys(), f"of {len(heard.told):,} acknowledged messages are gone")
    if lost:
        first = min(lost.values())
        _none([name for name, place in found.items() if place.physical_offset > first], "messages lie behind lost ones")
    heard.lost.update(lost)
    heard.durable = math.inf
    _none(found.keys() & heard.lost, "messages that a power cut had taken are there again")
    _none(found.keys() - heard.sent, "messages were never sent")
    _none([name for name, place in heard.told.items() if found.get(name, place) != place], "messages have moved")
    _check_progress(group)


def check_stopped(group: WarmGroup, *, whole: bool) -> None:
    """Stop in order; queues and index are what the log says, byte for byte if it is `whole`, nothing deleted of it."""
    group.wait_dispatched()
    assert group.stop() == 0, "the group did not stop in order"
    group.wait_free()
    verified = verify_store(StoreIO(), group.paths, _options(group), jobs=1)
    assert verified.clean, [finding.to_json() for finding in verified.findings.in_order()]
    if whole:
        assert_equals_rebuild(group)
    left = sorted(str(path) for path in group.store.rglob("*.tmp")) + semaphore_names(group.words()["store_id"])
    assert not left, left


def _options(group: WarmGroup) -> Options:
    return Options(**{name: value for name, value in group.options.items() if name in SMALL})


def _found(group: WarmGroup) -> tuple[dict[str, Place], dict[tuple[str, int], int]]:
    """Every message by its name, each of them once, and each queue's first offset."""
    found: dict[str, Place] = {}
    minima = {}
    with group.client(timeout=60.0) as client:
        for topic in {*TOPICS} & {each.topic for each in client.topics()}:
            for queue in client.queues(topic):
                minima[topic, queue.queue_id] = offset = queue.min_offset
                while offset < queue.max_offset:
                    pulled = client.pull(topic, queue.queue_id, offset, max_messages=4096)
                    for message in pulled.messages:
                        name = message.body.split()[0].decode()
                        assert name not in found, f"{name} is there twice"
                        found[name] = Place(topic, message.queue_id, message.queue_offset, message.physical_offset)
                    assert pulled.next_offset > offset, pulled
                    offset = pulled.next_offset
    return found, minima


def _check_progress(group: WarmGroup) -> None:
    with group.client(timeout=60.0) as client:
        try:
            queues = client.groups.info(GROUP).queues
        except GroupNotFoundError:
            return
    ahead = [queue for queue in queues if queue.offset is not None and queue.offset > queue.max_offset]
    assert not ahead, f"a group is ahead of its queues: {ahead}"


def _none(names: Collection[str], what: str) -> None:
    assert not names, f"{len(names):,} {what}: {sorted(names)[:NAMED]}"
