"""Dispatch lag: the age of the next message to dispatch, regardless of earlier ones."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.ipc.health import dispatch_behind_ms
from mqproc.layout import record
from mqproc.paths import StorePaths
from tests.support.command_line import call
from tests.support.fakes import write_log, write_record
from tests.support.group import Group, wait_until

SEGMENT = 65_536
BLANK = (200).to_bytes(4, "big") + record.MAGIC_BLANK.to_bytes(4, "big", signed=True)


def now_ms() -> int:
    return round(time.time() * 1000)


def behind_s(store: Path, dispatched: int, written: int, newest_age_s: float = 1) -> float:
    newest_ms = round(now_ms() - newest_age_s * 1000)
    words = {"dispatched": dispatched, "written": written, "written_store_timestamp_ms": newest_ms}
    return dispatch_behind_ms(StoreIO(), StorePaths(store), words) / 1000


def test_dispatch_lag_is_zero_when_caught_up(tmp_path: Path) -> None:
    assert behind_s(tmp_path, 9000, 9000, newest_age_s=3600) == 0


@pytest.mark.parametrize("born_v6", [False, True], ids=["IPv4", "IPv6"])
def test_dispatch_lag_is_age_of_next_message(tmp_path: Path, born_v6: bool) -> None:
    write_record(tmp_path, 0, now_ms() - 3_600_000)
    write_record(tmp_path, 6000, now_ms() - 12_000, born_v6=born_v6)
    assert 12 <= behind_s(tmp_path, 6000, 9000) < 60


def test_dispatch_lag_skips_segment_end(tmp_path: Path) -> None:
    write_log(tmp_path, SEGMENT - 200, BLANK)
    assert behind_s(tmp_path, SEGMENT - 200, SEGMENT) == 0
    write_record(tmp_path, SEGMENT, now_ms() - 12_000, segment=SEGMENT)
    assert behind_s(tmp_path, SEGMENT - 200, SEGMENT) == 0
    for dispatched in (SEGMENT - 200, SEGMENT):
        assert 12 <= behind_s(tmp_path, dispatched, SEGMENT + 100) < 60


def test_dispatch_lag_unreadable_log_uses_newest_message(tmp_path: Path) -> None:
    assert 5 <= behind_s(tmp_path, 6000, 9000, newest_age_s=5) < 60
    write_log(tmp_path, 6000, b"garbled" * 20)
    assert 5 <= behind_s(tmp_path, 6000, 9000, newest_age_s=5) < 60
    # The record has another record's offset.
    write_record(tmp_path, 6000, now_ms() - 3_600_000)
    assert 5 <= behind_s(tmp_path, 6001, 9000, newest_age_s=5) < 60


def test_dispatch_lag_after_idle_starts_at_zero_and_grows(
    make_group: Callable[..., Group],
) -> None:
    group = make_group(heartbeat_timeout_ms=600_000)

    def shown() -> dict[str, float]:
        """Values of each interface, in seconds."""
        port = wait_until(lambda: group.words()["monitor_port"], what="the monitor listens")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            line = next(line for line in answer.read().decode().splitlines()
                        if line.startswith("mqproc_dispatch_behind_seconds "))  # fmt: skip
        return {
            "metrics": float(line.split()[1]),
            "stat": call("stat", "--store", group.store, "--json").json["words"]["dispatch_behind_ms"] / 1000,
            "status": call("status", "--store", group.store, "--json").json["dispatch_behind_ms"] / 1000,
            "top": json.loads(call("top", "--store", group.store, "--json").out)["path"]["dispatch_behind_s"],
        }

    with group.client() as client:
        client.send("orders", b"before")
        client.wait_dispatched()
        time.sleep(3)
        assert set(shown().values()) == {0.0}
        os.kill(group.pid("dispatcher"), signal.SIGSTOP)
        # The message was stored between the two readings.
        begun = time.monotonic()
        client.send("orders", b"behind")
        sent = time.monotonic()
        first = call("stat", "--store", group.store, "--json").json["words"]["dispatch_behind_ms"] / 1000
        assert first <= time.monotonic() - begun + 0.1
        since = time.monotonic() - sent
        found = shown()
        until = time.monotonic() - begun
        assert all(since - 0.1 <= seconds <= until + 0.1 for seconds in found.values()), (since, found, until)
        time.sleep(1)
        later = shown()
        assert all(later[name] >= found[name] + 0.9 for name in found), (found, later)
    group.kill()
    dead = call("stat", "--store", group.store, "--json").json["words"]["dispatch_behind_ms"] / 1000
    assert dead > later["top"]
