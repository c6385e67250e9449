"""Makes the golden store `k_timer` anew: what RocketMQ's timer leaves that delivered some messages and was closed.

    python -m tests.interop.timer_store

Three messages are delivered. Of the others, five are due half a minute after that, the last ones sent first, one is due
with them and cancelled, and one is due so much later that it waits in a slot half a minute on, to be filed again then.
"""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any, Final

from tests.cli.calling import call
from tests.interop.java_stores import SIZES
from tests.interop.made_golden import make_golden
from tests.interop.rocketmq import Line, RocketMq, rocketmq_options

NAME: Final = "k_timer"
TOPIC: Final = "Later"
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
ROLL_S: Final = 40
OPTIONS: Final = SIZES | {
    "enabled_append_prop_crc": False,
    "mapped_file_size_timer_log": 1024,
    "timer_roll_window_slot": ROLL_S,
}
DELIVERED: Final = [f"delivered {number}" for number in range(3)]
WAITING: Final = [f"waiting {number}" for number in range(5)]
"""In the order of their times."""
CANCELLED, FAR = "cancelled", "far"
SOON_MS, LATER_MS, FAR_MS = 2_000, 30_000, 400 * 86_400_000
APART_MS: Final = 700


def parked(body: str, due_ms: int, **properties: str) -> Line:
    """What RocketMQ's broker makes of a message that names a time."""
    own = {"TIMER_DELIVER_MS": str(due_ms), "TIMER_OUT_MS": str(due_ms // 1000 * 1000)}
    real = {"REAL_TOPIC": TOPIC, "REAL_QID": "0"}
    return {
        "topic": TIMER_TOPIC,
        "queueId": 0,
        "body": base64.b64encode(body.encode()).decode(),
        "properties": {"UNIQ_KEY": unique_id(body)} | own | real | properties,
        "sysFlag": 0,
        "bornHost": "10.1.2.3",
        "storeHost": "192.168.1.2",
    }


def unique_id(body: str) -> str:
    return body.upper().replace(" ", "").ljust(32, "0")


def units(store: Path) -> list[tuple[int, int]]:
    """(slot, physical offset) of units of slots that are not delivered."""
    check = {row["name"]: row["value"] for row in dumped(store / "config" / "timercheck")}
    rows = [row for path in sorted((store / "timerlog").iterdir()) for row in dumped(path)]
    return sorted((row["slot_ms"], row["physical_offset"]) for row in rows if row["slot_ms"] >= check["read_ms"])


def dumped(path: Path) -> list[dict[str, Any]]:
    """The rows of `mqproc store dump`."""
    rows: list[dict[str, Any]] = call("store", "dump", path, "--json").json["rows"]
    return rows


def make(rocketmq: RocketMq, store: Path) -> None:
    """A store of RocketMQ's own, closed while messages wait."""
    opened = rocketmq.ask("open", store, options=rocketmq_options(OPTIONS))
    assert opened["started"], opened
    rocketmq.ask("timer", store)
    now_ms = time.time_ns() // 1_000_000
    later_ms = now_ms + LATER_MS
    messages = [parked(body, now_ms + SOON_MS) for body in DELIVERED]
    messages += [parked(body, later_ms + APART_MS * place) for place, body in reversed(list(enumerate(WAITING)))]
    messages += [parked(CANCELLED, later_ms)]
    messages += [parked("the cancellation", later_ms, TIMER_DEL_UNIQKEY=unique_id(CANCELLED))]
    messages += [parked(FAR, now_ms + FAR_MS)]
    assert {each["status"] for each in rocketmq.ask("append", store, messages=messages)} == {"PUT_OK"}
    told = rocketmq.ask("deliver", store, topic=TOPIC, messages=len(DELIVERED))
    assert (told["delivered"], told["queueOffset"]) == (len(DELIVERED), len(messages)), told
    assert rocketmq.ask("close", store) == {"clean": True}
    assert time.time_ns() // 1_000_000 < later_ms, "closing took too long: what was to wait is delivered"


if __name__ == "__main__":
    make_golden(NAME, make)
