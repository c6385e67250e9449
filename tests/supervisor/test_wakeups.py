"""How fast processors must wake: demanded of the kernel while a group runs that asks for it, and no longer."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest

from mqproc.errors import ConfigurationError
from mqproc.supervisor import wakeups
from mqproc.supervisor.wakeups import DEVICE, waking_within
from tests.cli.calling import call
from tests.conftest import Group


def demanded_us() -> int:
    """The strictest demand of all processes of this machine."""
    (found,) = struct.unpack("=i", DEVICE.read_bytes()[:4])
    return int(found)


@pytest.mark.skipif(not os.access(DEVICE, os.R_OK | os.W_OK), reason="only root may demand it, where the kernel has it")
def test_a_group_demands_it_until_it_ends(tmp_path: Path) -> None:
    before = demanded_us()
    if before == 0:
        pytest.skip("another process demands it already")
    wanted = min(before - 1, 9_999)
    group = Group(tmp_path / "store", cpu_latency_us=str(wanted)).start()
    try:
        assert demanded_us() <= wanted
    finally:
        group.close()
    assert demanded_us() == before


def test_nothing_is_demanded_unless_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wakeups, "DEVICE", tmp_path / "device")
    with waking_within(-1):
        assert not (tmp_path / "device").exists()


def test_a_demand_lies_in_the_device_while_it_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = tmp_path / "device"
    device.touch()
    monkeypatch.setattr(wakeups, "DEVICE", device)
    with waking_within(7):
        assert device.read_bytes() == struct.pack("=i", 7)


def test_a_system_that_takes_no_demand_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wakeups, "DEVICE", tmp_path / "none")
    with pytest.raises(ConfigurationError, match=r"cpu_latency_us = 0: .*none: No such file[a-z ]*$"), waking_within(0):
        pass


def test_who_may_not_demand_it_is_told_who_may(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigurationError, match="Permission denied; only root may write it"), waking_within(0):
        pass


def test_what_is_no_time_is_refused_before_anything_starts(tmp_path: Path) -> None:
    refused = call("up", "--store", tmp_path / "store", "--set", "cpu_latency_us=-2")
    assert refused.code == 8
    assert "cpu_latency_us" in refused.err
    assert not (tmp_path / "store" / "abort").exists()
