"""Makes the golden store `j_pop` anew: what a RocketMQ broker leaves that served POP requests and was shut down.

    python -m tests.interop.pop_store

Messages 0 to 3 of the topic have tag a, the others tag b, and the group asks for tag b.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.interop.made_golden import make_golden
from tests.interop.rocketmq import Line, RocketMq

NAME = "j_pop"
TOPIC, GROUP, TAG = "Popped", "workers", "b"
OPTIONS = {
    "mappedFileSizeCommitLog": 65536,
    "mappedFileSizeConsumeQueue": 2000,
    "maxHashSlotNum": 200,
    "maxIndexNum": 800,
    "mappedFileSizeTimerLog": 10400,
    "brokerName": "broker-a",
}
SOON_MS, LATER_MS, LATE_MS = 2_000, 600_000, 3_600_000
TIMEOUT_S = 60


def popped(rocketmq: RocketMq, store: Path, messages: int, invisible_ms: int, wait_ms: int = 1000) -> list[Line]:
    """What the group receives."""
    of: dict[str, Any] = {"topic": TOPIC, "group": GROUP, "tag": TAG}
    found: list[Line] = rocketmq.ask("pop", store, **of, messages=messages, invisibleMs=invisible_ms, waitMs=wait_ms)
    return found


def all_popped(rocketmq: RocketMq, store: Path, messages: int, invisible_ms: int) -> list[Line]:
    """The same, until there are so many. Raises TimeoutError."""
    found: list[Line] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < messages:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{found} and no more of {messages} messages came in {TIMEOUT_S} s")
        found += popped(rocketmq, store, messages - len(found), invisible_ms)
    return found


def ack(rocketmq: RocketMq, store: Path, message: Line) -> None:
    """It is done. A retry topic's message is asked for under its first topic."""
    retry = message["handle"].split(" ")[4] == "1"
    topic = f"%RETRY%{GROUP}_{TOPIC}" if retry else TOPIC
    rocketmq.ask("ack", store, topic=topic, group=GROUP, handle=message["handle"])


def make(rocketmq: RocketMq, store: Path) -> None:
    """Receive and acknowledge: 4 changed, 5 done, 6 open; 7, 8 done, 9 open; 10, 11 once more, 10 done, 11 open."""
    rocketmq.ask("broker", store, options=OPTIONS, topic=TOPIC, group=GROUP)
    for tag, numbers in (("a", range(4)), (TAG, range(4, 12))):
        rocketmq.ask("send", store, topic=TOPIC, tag=tag, bodies=[str(number) for number in numbers])
    first = all_popped(rocketmq, store, 3, LATER_MS)
    ack(rocketmq, store, first[1])
    rocketmq.ask("change", store, topic=TOPIC, group=GROUP, handle=first[0]["handle"], invisibleMs=LATE_MS)
    second = all_popped(rocketmq, store, 3, LATER_MS)
    for message in second[:2]:
        ack(rocketmq, store, message)
    assert len(all_popped(rocketmq, store, 2, SOON_MS)) == 2
    again = all_popped(rocketmq, store, 2, LATER_MS)
    assert [(each["body"], each["times"]) for each in again] == [("10", 1), ("11", 1)]
    ack(rocketmq, store, again[0])
    assert rocketmq.ask("stop", store) == {"clean": True}


if __name__ == "__main__":
    make_golden(NAME, make)
