"""A stopped store of ours with messages that wait: some for their time, some by level, some delivered already."""

from __future__ import annotations

import subprocess
from pathlib import Path

from mqproc import Message
from tests.conftest import PATIENCE_S, Group, wait_until

WAITING = 40
OPTIONS = {"mapped_file_size_timer_log": 1024}
PER_FILE = 19
"""Units of a file of the timer log: 1,024 bytes less 16, by 52."""


def make(folder: Path) -> Path:
    """The store: 5 messages that are delivered, then WAITING that wait, in 3 files of the timer log."""
    group = Group(folder / "timed", **OPTIONS).start()
    try:
        with group.client() as client:
            client.create_topic("later", 1)
            for number in range(5):
                # What is due when it comes does not wait at all, so a busy machine gets time to send it.
                client.send("later", b"soon %d" % number, delay=4)
            wait_until(lambda: group.words()["delivered_messages"] == 5)
            now_ms = client.send("later", b"now").store_timestamp_ms
            for number in range(WAITING):
                due_ms = now_ms + 3_600_000 + 1000 * (number % 4)
                client.send(Message("later", b"%d" % number, deliver_at_ms=due_ms, keys=[f"k{number}"]))
            client.send("later", b"by level", delay_level=18)
            with client.consumer("billing", "later", start="earliest") as consumer:
                assert consumer.receive(max_messages=4, timeout=PATIENCE_S)
            wait_until(lambda: group.words()["timed_messages"] == WAITING)
            group.wait_dispatched()
        assert group.stop() == 0
    finally:
        group.close()
    return group.store


def copy(store: Path, folder: Path) -> Path:
    """A copy, the wheel sparse as it is."""
    subprocess.run(["cp", "-a", "--sparse=always", store, folder], check=True)
    return folder / store.name
