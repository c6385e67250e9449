"""The CPU wake-up latency limit is requested only while a group with the option is busy."""

from __future__ import annotations

import errno
import os
import struct
import time
from pathlib import Path

import pytest

from mqproc.client._sync.client import Client
from mqproc.errors import ConfigurationError
from mqproc.supervisor import cpu_latency as wakeups
from mqproc.supervisor.cpu_latency import (
    AUTO_PROCESSORS_MAX,
    AUTO_US,
    DEVICE,
    NEVER_US,
    NO_DEMAND_US,
    request_cpu_latency,
)
from tests.support.command_line import call
from tests.support.group import Group, wait_until

SECOND_NS = 1_000_000_000


def demanded_us() -> int:
    """The strictest request of all processes on this machine."""
    (found,) = struct.unpack("=i", DEVICE.read_bytes()[:4])
    return int(found)


def many(client: Client) -> bool:
    """Send requests without pause for longer than the supervisor's idle time."""
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        client.send("orders", b"x")
    return True


@pytest.mark.skipif(not os.access(DEVICE, os.R_OK | os.W_OK), reason="only root may demand it, where the kernel has it")
def test_cpu_latency_is_requested_under_load(tmp_path: Path) -> None:
    """Groups of concurrent tests may temporarily request a stricter limit."""
    before = demanded_us()
    if before == 0:
        pytest.skip("another process demands it already")
    limit_us = min(before - 1, 9_999)
    group = Group(tmp_path / "store", cpu_latency_us=str(limit_us)).start()
    try:
        with group.client() as client:
            wait_until(lambda: demanded_us() == before)
            wait_until(lambda: many(client) and demanded_us() <= limit_us)
            wait_until(lambda: demanded_us() == before)
            wait_until(lambda: many(client) and demanded_us() <= limit_us)
    finally:
        group.close()
    wait_until(lambda: demanded_us() == before)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "device"
    monkeypatch.setattr(wakeups, "DEVICE", path)
    monkeypatch.setattr(os, "cpu_count", lambda: AUTO_PROCESSORS_MAX)
    return path


def demands(device: Path) -> list[int]:
    """Values written to the device, in order."""
    return [demand for (demand,) in struct.iter_unpack("=i", device.read_bytes())]


def test_cpu_latency_never_is_not_requested(device: Path) -> None:
    device.touch()
    with request_cpu_latency(NEVER_US) as wakeups:
        wakeups.update(SECOND_NS, 1_000_000, 1_000_000, 1)
    assert demands(device) == []


@pytest.mark.parametrize(
    ("sends", "reads", "waiting", "is_demanded"),
    [
        (500, 500, 1, True),
        (499, 1_000_000, 1, False),  # messages read were sent before
        (1_000_000, 499, 1, False),  # no single reads
        (1_000_000, 1_000_000, 0, False),  # the reader lags
    ],
)
def test_cpu_latency_auto_is_requested_for_awaited_messages(
    device: Path, sends: int, reads: int, waiting: int, is_demanded: bool
) -> None:
    device.touch()
    with request_cpu_latency(AUTO_US) as wakeups:
        wakeups.update(SECOND_NS, sends, reads, waiting)
        wakeups.update(2 * SECOND_NS, sends, reads, waiting)
    assert demands(device) == ([NO_DEMAND_US, 0, NO_DEMAND_US] if is_demanded else [NO_DEMAND_US])


def test_cpu_latency_auto_is_for_small_machines_only(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device.touch()
    for processors in AUTO_PROCESSORS_MAX, AUTO_PROCESSORS_MAX + 1:
        monkeypatch.setattr(os, "cpu_count", lambda count=processors: count)
        with request_cpu_latency(AUTO_US) as wakeups:
            wakeups.update(SECOND_NS, 1_000, 1_000, 1)
    assert demands(device) == [NO_DEMAND_US, 0]


def test_cpu_latency_auto_without_permission_is_skipped(device: Path) -> None:
    with request_cpu_latency(AUTO_US) as wakeups:
        wakeups.update(SECOND_NS, 1_000, 1_000, 1)
    assert not device.exists()


def test_cpu_latency_starts_at_100_per_second_ends_after_idle_1_s(device: Path) -> None:
    device.touch()
    looks = [
        (1.0, 99, []),
        (1.25, 123, []),
        (1.5, 148, [7]),  # 25 in a quarter of a second
        (1.75, 1_000_000, []),
        (2.0, 1_000_000, []),
        (2.5, 1_000_050, []),  # the next second begins
        (3.25, 1_000_060, []),
        (3.5, 1_000_060, [NO_DEMAND_US]),
        (9.0, 1_000_070, []),
        (9.25, 1_000_095, [7]),
    ]
    expected = [NO_DEMAND_US]
    with request_cpu_latency(7) as wakeups:
        for at_s, requests, written in looks:
            wakeups.update(int(at_s * SECOND_NS), requests // 2, requests - requests // 2, 0)
            expected += written
            assert demands(device) == expected, at_s


def test_cpu_latency_unsupported_system_is_named(device: Path) -> None:
    refused = pytest.raises(ConfigurationError, match=r"cpu_latency_us = 0: .*device: No such file[a-z ]*$")
    with refused, request_cpu_latency(0):
        pass


def test_cpu_latency_permission_error_says_who_may(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigurationError, match="Permission denied; only root may write it"), request_cpu_latency(0):
        pass


def test_cpu_latency_invalid_value_is_refused(tmp_path: Path) -> None:
    refused = call("up", "--store", tmp_path / "store", "--set", "cpu_latency_us=-3")
    assert refused.code == 8
    assert "cpu_latency_us" in refused.err
    assert not (tmp_path / "store" / "abort").exists()
