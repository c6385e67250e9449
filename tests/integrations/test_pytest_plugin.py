"""The pytest plugin in real runs of pytest, with and without pytest-xdist."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from mqproc.integrations import pytest_plugin
from tests.support.group import ROOT

TESTS = """
import pathlib
import mqproc

def note(store):
    store.client.wait_dispatched()
    names = sorted(each.topic for each in store.client.topics() if not each.topic.startswith("rmq_sys"))
    socket = pathlib.Path(store.client.store, "mqproc", "writer.sock").stat().st_ino
    names += [each.group for each in store.client.groups.all()]
    line = f"{store.client.store} {store.prefix} {socket} {','.join(names)}\\n"
    with open(pathlib.Path(__file__).with_name("notes"), "a") as file:
        file.write(line)

def test_first(mqproc_store):
    orders = mqproc_store.topic("orders")
    assert mqproc_store.topic("orders") == orders
    mqproc_store.client.send_batch(orders, [b"1", b"2"])
    with mqproc_store.client.consumer(mqproc_store.group("billing"), orders, start="earliest") as consumer:
        assert [message.body for message in consumer.messages(timeout=0.5)] == [b"1", b"2"]
    note(mqproc_store)

def test_second(mqproc_store):
    assert mqproc_store.client.queues(mqproc_store.topic("orders"))[0].max_offset == 0
    note(mqproc_store)

def test_third(mqproc_store):
    mqproc_store.client.send(mqproc_store.prefix + "other", b"x")
    note(mqproc_store)
"""


def run(folder: Path, *flags: str) -> list[list[str]]:
    """The notes of a run: store, prefix, the socket's inode, topics."""
    (folder / "test_orders.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmqproc_options =\n    default_topic_queue_nums=2\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "--basetemp=runs", *flags]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    return [line.split() for line in (folder / "notes").read_text().splitlines()]


def is_stopped(store: str) -> bool:
    done = subprocess.run(
        [sys.executable, "-m", "mqproc", "status", "--store", store], capture_output=True, check=False
    )
    return done.returncode == 9


def test_run_has_one_group_and_fresh_prefixes(tmp_path: Path) -> None:
    notes = run(tmp_path, "-p", "no:xdist")
    assert [prefix for _, prefix, *_ in notes] == ["t1-", "t2-", "t3-"]
    assert [topics for *_, topics in notes] == ["t1-orders,t1-billing", "t2-orders", "t3-other"]
    (store,) = {store for store, *_ in notes}
    assert is_stopped(store)


def test_workers_of_xdist_share_the_group(tmp_path: Path) -> None:
    notes = run(tmp_path, "-n", "2", "--dist", "load")
    assert len({(store, socket) for store, _, socket, _ in notes}) == 1
    assert len({prefix for _, prefix, *_ in notes}) == 3
    assert {prefix.partition("t")[0] for _, prefix, *_ in notes} <= {"gw0", "gw1"}
    assert is_stopped(notes[0][0])


def test_entry_point_names_the_plugin() -> None:
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert entries == {"mqproc": pytest_plugin.__name__}
