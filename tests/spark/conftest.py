"""One small store with rolled files of every kind; and one Spark session for all tests that need it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mqproc.spark.session import local_session
from tests.spark import quick
from tests.support.group import Group
from tests.support.store_builders import StoppedStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def rolled_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """640 messages of three topics with four queues each; segments, queues and index are several files each."""
    store = StoppedStore(tmp_path_factory.mktemp("rolled") / "store")
    for folder in ("commitlog", "consumequeue/First/0", "index"):
        assert len(list((store.root / folder).iterdir())) > 1
    return store.root


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """A running group for the tests of a file, each of which has topics of its own; its store is called `s1`."""
    group = Group(tmp_path_factory.mktemp("running") / "s1").start()
    yield group
    group.stop()
    group.close()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Two threads, nothing on the network, everything below pytest's folder."""
    folder = tmp_path_factory.mktemp("spark")
    session = local_session(
        "local[2]",
        settings=quick.SETTINGS
        | {
            "spark.local.dir": str(folder),
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.sql.python.filterPushdown.enabled": "true",
        },
    )
    yield session
    session.stop()
