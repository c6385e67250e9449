"""Fixtures of the client tests: roles in memory with real sockets, and a real group."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TypeVar

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
    """A real group for the tests of a module that stop no process."""
    group = Group(tmp_path_factory.mktemp("shared") / "store").start()
    yield group
    group.close()


# Python calls made by a function

T = TypeVar("T")


def steps_of(run: Callable[[], T]) -> tuple[T, list[str]]:
    """The result of `run`, and the names of the functions that it calls.

    C functions are listed only if they raise.

    Garbage collection is off: hypothesis registers a callback for it.
    """
    steps: list[str] = []

    def note(frame: FrameType, event: str, called: object) -> None:
        if event == "call" and frame.f_code is not run.__code__:
            steps.append(frame.f_code.co_name)
        elif event == "c_exception":
            steps.append(f"{called!r} raises")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        value = run()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return value, steps
