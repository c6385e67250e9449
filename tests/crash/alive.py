"""A recovered store lives: roles start on it, take a message, dispatch it, and hand it out."""

from __future__ import annotations

import random
from pathlib import Path

from mqproc.client import requests as core
from mqproc.client import send_requests as sending
from mqproc.config.options import Options
from mqproc.types import Message, PullStatus, SendResult
from tests.crash.group import Group
from tests.crash.placed import expect
from tests.crash.recording_io import Machine
from tests.crash.schedule import Schedule, SimulatedClock
from tests.crash.tasks import Caller

TOPIC, KEY, BODY = "Alive", "alive", b"alive"
TURNS_MAX = 3_000
TURN_MS = 5
PULL_BYTES = 1 << 16
FOREVER_MS = 1 << 60
STEPS = ("stored", "read by its queue", "read by its key")


def check_alive(root: Path, options: Options, machine: Machine, rng: random.Random, now_ms: int) -> None:
    """Start a group on the store at `root`, send, and read what was sent by its queue and by its key."""
    schedule = Schedule(rng, machine.journal)
    machine.between = schedule.pause
    clock = SimulatedClock(schedule, now_ms)
    group = Group(root, options, machine, schedule, clock)
    done: list[str] = []
    try:
        if group.read_only:
            return
        schedule.add("somebody", lambda: _send_and_read(group, schedule, now_ms, done))
        for _ in range(TURNS_MAX):
            if "somebody" not in schedule.names:
                break
            schedule.turn()
            clock.advance(TURN_MS)
        expect(len(done) == len(STEPS), f"after {TURNS_MAX:,} turns: {done} of {STEPS}")
    finally:
        group.kill_all()


def _send_and_read(group: Group, schedule: Schedule, now_ms: int, done: list[str]) -> None:
    writer, query = (Caller(group.paths.socket(name), schedule) for name in ("writer", "query"))
    try:
        stored = _stored(writer, schedule, now_ms)
        done.append(STEPS[0])
        while not _is_in_queue(query, stored):
            schedule.pause()
        done.append(STEPS[1])
        while not _has_key(query, stored):
            schedule.pause()
        done.append(STEPS[2])
    finally:
        writer.close()
        query.close()


def _stored(writer: Caller, schedule: Schedule, now_ms: int) -> SendResult:
    """Until it is taken: the next segment may not be there yet."""
    message = Message(TOPIC, BODY, "", (KEY,), born_timestamp_ms=now_ms)
    while True:
        outcome = writer.call(sending.send(message))
        if outcome.error is None:
            stored: SendResult = outcome.value
            return stored
        schedule.pause()


def _is_in_queue(query: Caller, stored: SendResult) -> bool:
    place = TOPIC, stored.queue_id, stored.queue_offset
    request = core.pull_request(*place, 1, PULL_BYTES, "", 0.0, False)
    outcome = query.call(core.pull(request))
    if outcome.error is not None or outcome.value.status is not PullStatus.FOUND:
        return False
    (message,) = outcome.value.messages
    found = message.physical_offset, message.body, message.queue_offset
    expect(found == (stored.physical_offset, BODY, stored.queue_offset), f"{place} has {found}, not {stored}")
    return True


def _has_key(query: Caller, stored: SendResult) -> bool:
    outcome = query.call(core.with_key(TOPIC, KEY, 0, FOREVER_MS, max_bytes=PULL_BYTES))
    if outcome.error is not None:
        return False
    messages, _are_all = outcome.value
    return stored.physical_offset in [message.physical_offset for message in messages]
