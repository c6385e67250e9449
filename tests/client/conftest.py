"""Roles in memory for the clients' tests: real sockets and frames, no files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc.client.sync import Client
from tests.client.memory_roles import MemoryRoles
from tests.conftest import PATIENCE_S


@pytest.fixture
def roles(tmp_path: Path) -> Iterator[MemoryRoles]:
    (tmp_path / "mqproc").mkdir(mode=0o700)
    with MemoryRoles(tmp_path) as roles:
        yield roles


@pytest.fixture
def client(roles: MemoryRoles) -> Iterator[Client]:
    with Client(roles.store, timeout=PATIENCE_S) as client:
        yield client
