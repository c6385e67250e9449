"""pytest: the fixture `mqproc_store`, a real store for each test.

    def test_order_is_stored(mqproc_store):
        orders = mqproc_store.topic("orders")
        mqproc_store.client.send(orders, b"paid")

One group of processes serves a whole run, also that of pytest-xdist's workers: its start takes seconds, a test
milliseconds. Each test has a prefix of its own for topics and groups, and its topics are deleted after it.

The ini option `mqproc_options` has engine options for the group, one `name=value` a line.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from mqproc.embedded import OpenedClient

_OPTIONS: Final = {
    "mapped_file_size_commit_log": 16 << 20,
    "max_hash_slot_num": 50_000,
    "max_index_num": 200_000,
    "max_message_size": 4 << 20,
    "metrics_port": 0,
}
_numbers = itertools.count(1)


@dataclass(frozen=True)
class TestStore:
    """A test's part of the store: a client, the store's folder, and the prefix of its names."""

    __test__ = False  # pytest collects classes named Test…

    client: OpenedClient
    path: Path
    prefix: str

    def topic(self, name: str, queues: int = 1) -> str:
        """Create a topic, unless it exists, and return its full name."""
        topic = self.prefix + name
        if not self.client.queues(topic):
            self.client.create_topic(topic, queues)
        return topic

    def group(self, name: str) -> str:
        """The full name of a consumer group."""
        return self.prefix + name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("mqproc_options", "engine options of the store of mqproc_store, one NAME=VALUE a line", "linelist")


@pytest.fixture(scope="session")
def mqproc_group(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[OpenedClient]:
    """A client of the group that serves this run; the last worker that ends stops the group."""
    import mqproc

    given: dict[str, Any] = dict(line.split("=", 1) for line in pytestconfig.getini("mqproc_options"))
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(pytestconfig, "workerinput") else base
    with mqproc.open(shared / "mqproc-store", options=_OPTIONS | given) as client:
        yield client


@pytest.fixture
def mqproc_store(mqproc_group: OpenedClient, pytestconfig: pytest.Config) -> Iterator[TestStore]:
    """A store with a fresh prefix for topics and groups."""
    from mqproc.errors import MqprocError

    worker = getattr(pytestconfig, "workerinput", {}).get("workerid", "")
    store = TestStore(mqproc_group, Path(mqproc_group.store), f"{worker}t{next(_numbers)}-")
    yield store
    for group in store.client.groups.all():
        if group.group.startswith(store.prefix):
            with contextlib.suppress(MqprocError):  # The test has left a consumer open.
                store.client.groups.delete(group.group)
    for info in store.client.topics():
        if info.topic.startswith(store.prefix):
            store.client.delete_topic(info.topic)
