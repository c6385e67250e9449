"""For the clients' tests: roles in memory, with real sockets and frames and no files; and a group of real ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc.client._sync.client import Client
from tests.client.memory_roles import MemoryRoles
from tests.support.group import PATIENCE_S, Group


@pytest.fixture
def roles(tmp_path: Path) -> Iterator[MemoryRoles]:
    (tmp_path / "mqproc").mkdir(mode=0o700)
    with MemoryRoles(tmp_path) as roles:
        yield roles


@pytest.fixture
def client(roles: MemoryRoles) -> Iterator[Client]:
    with Client(roles.store, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """One real group for all tests of a module that kill nothing; each has topics and groups of its own."""
    group = Group(tmp_path_factory.mktemp("shared") / "store").start()
    yield group
    group.close()
