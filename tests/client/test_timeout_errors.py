"""Timeout errors: peer, elapsed time and cause."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

import mqproc
from mqproc.client import connection
from mqproc.config.options import Options
from mqproc.errors import RequestTimeoutError, SendOutcomeUnknownError
from mqproc.io.store_io import Clock, StoreIO
from mqproc.ipc.control import Control
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store.access import write_settings
from mqproc.util.units import format_time
from tests.client.memory_roles import MemoryRoles
from tests.support.group import PATIENCE_S

TIMEOUT_S = 0.1


def errors_of(store: Path) -> tuple[str, str, str]:
    """Errors of a send, a pull and an asynchronous pull whose roles do not answer."""

    async def pull() -> str:
        async with mqproc.AsyncClient(store, timeout=TIMEOUT_S) as client:
            with pytest.raises(RequestTimeoutError) as raised:
                await client.pull("t", 0, 0)
        return str(raised.value)

    with MemoryRoles(store) as roles, mqproc.Client(store, timeout=TIMEOUT_S) as client:
        roles.behaviour = lambda request: True
        with pytest.raises(SendOutcomeUnknownError) as sent:
            client.send("t", b"x")
        with pytest.raises(RequestTimeoutError) as pulled:
            client.pull("t", 0, 0)
        return str(sent.value), str(pulled.value), asyncio.run(pull())


@pytest.fixture
def control(tmp_path: Path) -> Control:
    paths = StorePaths(tmp_path)
    paths.own.mkdir(mode=0o700)
    write_settings(StoreIO(), paths, Options())
    return Control.create(StoreIO(), paths, Clock(), os.getpid())


def test_timeout_error_names_recovery(tmp_path: Path, control: Control) -> None:
    control.store(words_of.GROUP_STATE, words_of.GROUP_RECOVERING)
    control.store(words_of.RECOVERY_STEP, words_of.STEP_KERNELS)
    since = format_time(control.load(words_of.GROUP_STARTED_MS))
    remedy = "wait until the recovery has finished"
    why = re.escape(f"the group is recovering: making kernels ready, since {since}: {remedy}")
    sent, *pulled = errors_of(tmp_path)
    waited = r"no answer in [\d.]+ s"
    writer, query = (re.escape(str(StorePaths(tmp_path).socket(name))) for name in ("writer", "query"))
    assert re.fullmatch(f"{writer}: {waited}, {why}; the request may be carried out yet", sent)
    for each in pulled:
        assert re.fullmatch(f"{query}: {waited}, {why}", each)


def test_timeout_error_names_missing_role(tmp_path: Path, control: Control) -> None:
    control.store(words_of.GROUP_STATE, words_of.GROUP_READY)
    control.store(words_of.SUPERVISOR_HEARTBEAT_NS, Clock().monotonic_ns())
    for each in errors_of(tmp_path):
        assert "s, writer is " in each


def test_timeout_error_without_control_file_has_no_cause(tmp_path: Path) -> None:
    (tmp_path / "mqproc").mkdir(mode=0o700)
    sent, *pulled = errors_of(tmp_path)
    assert sent.endswith(" s; the request may be carried out yet")
    assert all(each.endswith(" s") for each in pulled)


def test_timeout_cause_is_read_once_for_many_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mqproc").mkdir(mode=0o700)
    looks: list[Path] = []

    def look(socket: Path) -> list[str]:
        looks.append(socket)
        return ["the reason"]

    async def send() -> list[str]:
        async with mqproc.AsyncClient(tmp_path, timeout=TIMEOUT_S) as client:
            sends = [client.send("t", b"x") for _ in range(300)]
            return [str(one) for one in await asyncio.gather(*sends, return_exceptions=True)]

    monkeypatch.setattr(connection, "_problems", look)
    monkeypatch.setattr(connection, "_CACHED_FOR_S", PATIENCE_S)
    with MemoryRoles(tmp_path) as roles:
        roles.behaviour = lambda request: True
        found = asyncio.run(send())
    assert all("the reason" in each for each in found)
    assert len(looks) == 1, "not three hundred times"
