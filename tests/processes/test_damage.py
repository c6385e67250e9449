"""Damage in a real group: stores that `mqproc up` accepts or refuses, errors for clients."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqproc.cli.admin.lifecycle import group_status
from mqproc.errors import CorruptStoreError, StoreReadOnlyError
from mqproc.layout import index_file
from mqproc.types import PullStatus
from tests.support.group import Group, wait_until

COUNT = 300


def filled(group: Group) -> list[int]:
    """Send messages and stop cleanly; return their offsets."""
    with group.client() as client:
        told = client.send_batch(
            "damage", [b"%04d" % n * 30 for n in range(COUNT)], keys=[f"k{n}" for n in range(COUNT)]
        )
    group.wait_dispatched()
    assert group.stop() == 0
    offsets: list[int] = told.physical_offsets.tolist()
    return offsets


def flip(group: Group, offset: int) -> None:
    """Change one byte of a message's body."""
    with (group.paths.commit_log / f"{0:020d}").open("r+b") as file:
        file.seek(offset + 100)
        file.write(b"\xff")


def forget_marks(group: Group) -> None:
    for path in group.paths.marks.iterdir():
        path.unlink()


def served(group: Group) -> tuple[set[bytes], list[str]]:
    """(bodies, reports of damage) of pulls over all queues."""
    bodies: set[bytes] = set()
    told: list[str] = []
    with group.client() as client:
        for queue in client.queues("damage"):
            offset = queue.min_offset
            while offset < queue.max_offset:
                pulled = client.pull("damage", queue.queue_id, offset, max_messages=100)
                if pulled.status is PullStatus.CORRUPT:
                    told.append(pulled.detail)
                bodies.update(message.body for message in pulled.messages)
                assert pulled.next_offset > offset
                offset = pulled.next_offset
    return bodies, told


def test_damage_is_skipped_and_reported_everywhere(make_group: Callable[..., Group]) -> None:
    group = make_group()
    offsets = filled(group)
    flip(group, offsets[7])
    forget_marks(group)
    group.start()
    bodies, told = served(group)
    assert bodies == {b"%04d" % n * 30 for n in range(COUNT) if n != 7}
    assert len(told) == 1
    assert f"[{offsets[7]}, {offsets[8]})" in told[0]
    assert group.words()["damage_holes"] == 1
    assert f"offset {offsets[7]:,}" in group.output.read_text()
    status = run(group, "status")
    assert "DAMAGED: 1 ranges of the log" in status.stdout
    with group.client() as client:
        client.send("damage", b"after")
    # After a kill and restart the damage is known and does not prevent the start.
    group.kill()
    group.start()
    assert served(group)[0] == bodies | {b"after"}
    holes = json.loads(group.paths.damage.read_text())["holes"]
    assert [(hole["start"], hole["stop"]) for hole in holes] == [(offsets[7], offsets[8])]
    assert group.stop() == 0


def test_damage_found_by_dispatch_is_skipped(make_group: Callable[..., Group]) -> None:
    """Without queues and index, dispatch is the first to read the log, whose mark is valid."""
    group = make_group()
    offsets = filled(group)
    with (group.paths.commit_log / f"{0:020d}").open("r+b") as file:
        file.seek(offsets[50])
        file.write(bytes(offsets[52] - offsets[50]))
    for name in ("consumequeue", "index"):
        (group.paths.marks / name).unlink()
    group.start()
    bodies, told = served(group)
    assert bodies == {b"%04d" % n * 30 for n in range(COUNT) if n not in (50, 51)}
    assert all(f"[{offsets[50]}, {offsets[52]})" in line for line in told)
    assert told
    assert group.stop() == 0


def test_damage_unreadable_log_pages_end_no_role(make_group: Callable[..., Group]) -> None:
    group = make_group()
    filled(group)
    group.start()
    with group.client() as client:
        sent = client.send_batch("damage", [bytes(1000)] * 1200).physical_offsets
    group.wait_dispatched()
    segment = group.paths.commit_log / f"{0:020d}"
    size = segment.stat().st_size
    assert sent[-1] > size
    assert len(served(group)[0]) == COUNT + 1
    query = group.pid("query")
    cut = size // 2
    os.truncate(segment, cut)
    bodies, told = served(group)
    assert group.pid("query") == query
    assert bodies >= {b"%04d" % n * 30 for n in range(COUNT)}
    assert told
    assert group.output.read_text().count(f"{segment.name}: offset") == 1
    group.kill()


def test_damage_unreadable_index_page_fails_its_keys_only(
    make_group: Callable[..., Group],
) -> None:
    """Each such look-up killed query, and five in a minute halted the group.

    Without an error, the result would silently be incomplete.
    """
    group = make_group(max_hash_slot_num=5_000_000)  # so many that keys do not share a slot
    filled(group)
    group.start()
    (index,) = group.paths.index.iterdir()
    query = group.pid("query")
    with group.client() as client:
        assert [len(client.by_key("damage", f"k{n}")) for n in range(COUNT)] == [1] * COUNT
        os.truncate(index, index_file.item_offset(group.options["max_hash_slot_num"], COUNT // 2) & -mmap.PAGESIZE)
        # The first messages' entries still exist.
        assert len(client.by_key("damage", "k0")) == 1
        with pytest.raises(CorruptStoreError, match=f"{index}: a part that leads to the key 'k{COUNT - 1}' cannot be"):
            client.by_key("damage", f"k{COUNT - 1}")
    assert group.pid("query") == query
    assert group.output.read_text().count(f"{index.name}: offset") == 1
    group.kill()


def test_damage_refusal_has_name_and_exit_code(make_group: Callable[..., Group]) -> None:
    group = make_group()
    offsets = filled(group)
    flip(group, offsets[7])
    forget_marks(group)
    refused = run(group, "up", "--set", "on_damage=refuse")
    assert refused.returncode == 6
    assert f"offset {offsets[7]:,}: damage in the log" in refused.stderr
    link = group.paths.commit_log / f"{1 << 30:020d}"
    link.symlink_to(group.paths.checkpoint)
    refused = run(group, "up")
    assert refused.returncode == 3
    assert f"{link}: a symlink" in refused.stderr
    link.unlink()
    for name in ("abort", "config/topics.json"):
        (group.store / name).unlink(missing_ok=True)
        (group.store / name).mkdir()
    group.start()
    assert len(served(group)[0]) == COUNT - 1
    wait_until(lambda: group.paths.topics.is_file(), what="a new topics.json")
    assert group.stop() == 0


def run(group: Group, *command: str) -> subprocess.CompletedProcess[str]:
    flags: list[Any] = ["--store", str(group.store)]
    if command[0] == "up":
        flags += [part for name, value in group.options.items() for part in ("--set", f"{name}={value}")]
    return subprocess.run(
        [sys.executable, "-m", "mqproc", *command, *flags],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        cwd=Path(__file__).parents[2],
    )


def test_damage_with_on_damage_read_only_refuses_sends_only(make_group: Callable[..., Group]) -> None:
    group = make_group(on_damage="read_only")
    offsets = filled(group)
    flip(group, offsets[100])
    forget_marks(group)
    group.start()
    with group.client() as client:
        with pytest.raises(StoreReadOnlyError, match=r"1 damaged range and on_damage = read_only"):
            client.send("damage", b"more")
        health = client.health()
        assert (health.ready, health.read_only) == (False, True)
        bodies, told = served(group)
    found = group_status(group.paths, 10)
    assert (found["ready"], found["read_only"]) == (False, True)
    assert len(bodies) == COUNT - 1
    assert len(told) == 1
