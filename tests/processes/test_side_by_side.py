"""Two groups on one machine share nothing, and the end of one does not affect the other."""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

from mqproc.layout import control as words_of
from tests.support.group import Group, wait_until


def bodies(group: Group) -> list[bytes]:
    with group.client() as client:
        client.wait_dispatched()
        return sorted(message.body for message in client.range("orders"))


def test_two_groups_share_nothing(make_group: Callable[..., Group]) -> None:
    first = make_group("first")
    port = wait_until(lambda: first.words()["monitor_port"], what="the first one's port")
    # Both use the same port: the second runs without it, and binds it when the first has ended.
    second = make_group("second", metrics_port=port)
    ids = {group.words()["store_id"] for group in (first, second)}
    assert len(ids) == 2
    for group in (first, second):
        with group.client() as client:
            client.send_batch("orders", [f"{group.store.name} {n}".encode() for n in range(50)])
    assert second.words()["monitor_port"] == 0
    for group in (first, second):
        assert bodies(group) == sorted(f"{group.store.name} {n}".encode() for n in range(50))
    assert not [name for name in os.listdir("/dev/shm") if any(f"{each:016x}" in name for each in ids)]

    pids = {role: second.pid(role) for role in (words_of.SUPERVISOR, *words_of.ROLES)}
    first.kill()
    assert {role: second.pid(role) for role in pids} == pids
    wait_until(lambda: second.words()["monitor_port"] == port, 30, "the port, when it is free")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
        assert answer.status == 200
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    appended = re.search(r'^mqproc_messages_appended_total\{topic="orders"\} (\d+)', text, re.MULTILINE)
    assert appended is not None
    assert appended[1] == "50"
    assert Path(f"/proc/{pids[words_of.SUPERVISOR]}").exists()
    assert second.stop() == 0
