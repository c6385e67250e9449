"""A reader of a running store's files: its group is stopped, started and killed; threads."""

from __future__ import annotations

import multiprocessing
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mqproc import BadRequestError, Conditions, StoreReader
from mqproc.paths import StorePaths
from mqproc.store.read import reader as reader_module
from mqproc.store.read.views import GroupView
from tests.support.group import PATIENCE_S, Group, wait_until


def test_store_reader_continues_with_next_group(group: Group) -> None:
    with group.client() as client:
        client.create_topic("T", queues=1)
        client.send_batch("T", bodies=[b"1", b"2"])
        client.wait_dispatched()
    with StoreReader(group.store) as reader:
        assert reader.max_offset("T", 0) == 2
        queues = reader.reading.queues
        messages = reader.messages("T")
        assert next(messages).body == b"1"
        assert group.stop() == 0
        assert reader.max_offset("T", 0) == 2, "offsets published by its group remain"
        group.start()
        with group.client() as client:
            client.send("T", b"3")
            client.create_topic("U", queues=1)
            client.send("U", b"4")
            client.wait_dispatched()
        wait_until(lambda: reader.max_offset("T", 0) == 3)
        assert [message.body for message in messages] == [b"2"], "as far as the queue was when they were asked for"
        assert [message.body for message in reader.messages()] == [b"1", b"2", b"3", b"4"]
        assert reader.count("T") == 3
        assert {topic.topic for topic in reader.topics()} >= {"T", "U"}
        assert reader.running
        old = queues.bounds("T", 0)
        assert old is not None
        assert old.max_offset == 2, "a reader of the old group's queues still sees them"


def test_store_reader_continues_with_other_store_at_path(tmp_path: Path) -> None:
    first = Group(tmp_path / "store")
    second = Group(tmp_path / "store", mapped_file_size_commit_log=2 << 20, mapped_file_size_consume_queue=200)
    bodies = [b"new-%d" % number for number in range(30)]
    try:
        with first.start().client() as client:
            client.send_batch("T", [b"old"] * 2)
            client.wait_dispatched()
        with StoreReader(first.store) as reader:
            assert len(list(reader.messages("T"))) == 2
            assert first.stop() == 0
            shutil.rmtree(first.store)
            with second.start().client() as client:
                wait_until(lambda: reader.visible.end == 0)
                client.create_topic("T", queues=1)
                client.send_batch("T", bodies)
                client.wait_dispatched()
            assert [message.body for message in reader.messages("T")] == bodies
            assert reader.options.mapped_file_size_commit_log == 2 << 20
    finally:
        first.close()
        second.close()


def test_store_reader_follows_flush_mode_of_next_group(
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    first = Group(store, flush_disk_type="ASYNC_FLUSH").start()
    second = Group(store, flush_disk_type="SYNC_FLUSH")
    try:
        with StoreReader(store) as reader:
            assert not reader.options.sync_flush
            assert first.stop() == 0
            second.start()
            with second.client() as client:
                client.send("T", b"1")
                client.wait_dispatched()
            wait_until(lambda: reader.visible.end > 0 and reader.options.sync_flush)
            words = second.words()
            assert reader.visible.end == max(words["writer_synced"], words["flusher_synced"])
    finally:
        first.close()
        second.close()


def test_store_reader_is_shared_by_threads(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each call finds that the group was restarted."""
    monkeypatch.setattr(reader_module, "_CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(GroupView, "is_current", lambda *_: False)
    bodies = [b"%d" % number for number in range(6000)]
    with group.client() as client:
        client.create_topic("T", queues=1)
        client.send_batch("T", bodies, keys=[f"k{number % 200}" for number in range(6000)])
        client.wait_dispatched()
    with StoreReader(group.store) as reader, ThreadPoolExecutor(8) as pool:
        questions: list[tuple[Callable[[], Any], Any]] = [
            (lambda: [message.body for message in reader.messages("T")], bodies),
            (lambda: [message.body for message in reader.range("T")], bodies),
            (lambda: len(list(reader.scan(Conditions("T")))), 6000),
            (lambda: len(reader.by_key("T", "k3")), 30),
            (lambda: reader.count("T"), 6000),
        ]
        usual_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            asked = [(pool.submit(ask), answer) for _ in range(8) for ask, answer in questions]
            assert [answer.result(PATIENCE_S) for answer, _ in asked] == [answer for _, answer in asked]
        finally:
            sys.setswitchinterval(usual_s)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_store_reader_works_in_fork_during_other_thread_call(tmp_path: Path) -> None:
    StorePaths(tmp_path).commit_log.mkdir()
    asked, forked = threading.Event(), threading.Event()

    def ask() -> None:
        with reader._lock:
            asked.set()
            forked.wait(PATIENCE_S)

    with StoreReader(tmp_path) as reader, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        assert asked.wait(PATIENCE_S)
        child = multiprocessing.get_context("fork").Process(target=reader.topics, daemon=True)
        child.start()
        child.join(PATIENCE_S)
        forked.set()
        asking.result(PATIENCE_S)
        assert child.exitcode == 0


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda r: r.pull("T", "0", 0), "queue_id = '0' is not a whole number"),
        (lambda r: r.pull("T", 0, pd.NA), "offset = <NA> is not a whole number"),
        (lambda r: r.pull("T", 0, 0, tags="a"), "tags = 'a' is not a list of texts"),
        (lambda r: r.pull("T", 0, 0, tags=["\ud800"]), "tags = .* is not UTF-8"),
        (lambda r: r.max_offset(np.array(["T"]), 0), "topic = array.* is not text"),
        (lambda r: r.get(pd.NA), "message_id = <NA> is not text"),
        (lambda r: r.look(1 << 70), "physical_offset = 118.* is not a number of 64 bits"),
        (lambda r: r.by_key("T", "k", 0.5), "begin_ms = 0.5 is not a whole number"),
        (lambda r: r.by_key("T", "k", unique=pd.NA), "unique = <NA> is not true or false"),
        (lambda r: r.count("T", None), "begin_ms = None is not a whole number"),
        (lambda r: list(r.range("T", end_ms="5")), "end_ms = '5' is not a whole number"),
        (lambda r: list(r.messages("T", 0.5)), "queue_id = 0.5 is not a whole number"),
        (lambda r: list(r.scan(5)), "conditions = 5 is not of the type Conditions"),
        (lambda r: list(r.scan(Conditions(5))), "topic = 5 is not text"),
        (lambda r: list(r.scan(Conditions(body_contains="a"))), "body_contains = 'a' is not bytes"),
        (lambda r: r.pull(topic="T", queue_id="0", offset=0), "queue_id = '0' is not a whole number"),
    ],
)
def test_store_reader_reports_mistakes(tmp_path: Path, ask: Callable[[StoreReader], object], told: str) -> None:
    StorePaths(tmp_path).commit_log.mkdir()
    with StoreReader(tmp_path) as reader:
        with pytest.raises(BadRequestError, match=told):
            ask(reader)
        assert reader.max_offset("T", np.int32(0)) == 0
        assert reader.count("T", tags={"a", "b"}) == 0  # type: ignore[arg-type]
        assert reader.by_key("T", "\ud800") == []
        assert list(reader.scan(Conditions("\ud800"))) == []
        with pytest.raises(TypeError):
            reader.max_offset("T", 0, 0)  # type: ignore[call-arg]
