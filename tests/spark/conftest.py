"""Shared fixtures: a small store with rolled files of each kind, and one Spark session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mqproc.spark.session import local_session
from tests.spark import support
from tests.support.group import Group
from tests.support.store_builders import StoppedStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def rolled_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """640 messages in three topics with four queues each; log, queues and index span files."""
    store = StoppedStore(tmp_path_factory.mktemp("rolled") / "store")
    for folder in ("commitlog", "consumequeue/First/0", "index"):
        assert len(list((store.root / folder).iterdir())) > 1
    return store.root


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """One running group per test module; each test uses its own topics. The store is named `s1`."""
    group = Group(tmp_path_factory.mktemp("running") / "s1").start()
    yield group
    group.stop()
    group.close()


@pytest.fixture(scope="session")
def spark_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Settings without network, and all files in pytest's temporary folder."""
    folder = tmp_path_factory.mktemp("spark")
    yield support.SETTINGS | {
        "spark.local.dir": str(folder),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.python.filterPushdown.enabled": "true",
    }
    support.end_session()


@pytest.fixture(scope="module")
def spark(spark_settings: dict[str, str]) -> SparkSession:
    """Local session with two threads. All modules share it, until one ends it."""
    return local_session("local[2]", settings=spark_settings)
