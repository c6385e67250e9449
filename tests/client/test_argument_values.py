"""Invalid numbers given to consumers raise BadRequestError, not Python's own errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mqproc import AsyncClient, Client, ResetTo, TransactionResolution
from mqproc.client.group_requests import check_reset, start_of
from mqproc.client.transaction_requests import resolution_of
from mqproc.errors import BadRequestError
from mqproc.util.arguments import at_least_one, milliseconds, moment_after, true_or_false
from tests.support.group import PATIENCE_S, Group, fill


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    started = Group(tmp_path / "store").start()
    yield started
    started.close()


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", None])
def test_at_least_one_refuses_other_values(value: Any) -> None:
    assert at_least_one("workers", 1) == 1
    with pytest.raises(BadRequestError, match=r"^workers = .* is out of range: 1 at least$"):
        at_least_one("workers", value)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "5", None])
def test_a_clients_timeout_lets_it_wait(tmp_path: Path, value: Any) -> None:
    for kind in (Client, AsyncClient):
        assert kind(tmp_path, timeout=np.float32(0.5)).timeout_s == 0.5
        with pytest.raises(BadRequestError, match=rf"^timeout = {value!r} is out of range: above 0, and finite$"):
            kind(tmp_path, timeout=value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), Decimal("snan"), "1s", None])
def test_a_duration_is_a_number_of_seconds(value: Any) -> None:
    assert milliseconds("timeout", 0.0304) == 30
    with pytest.raises(BadRequestError, match=r"^timeout = .* is no number of seconds$"):
        milliseconds("timeout", value)


@pytest.mark.parametrize("value", [None, 1, "True", np.array([True])])
def test_a_truth_is_true_or_false(value: Any) -> None:
    assert [true_or_false("enabled", each) for each in (True, np.False_)] == [True, False]
    with pytest.raises(BadRequestError, match=r"^enabled = .* is neither True nor False$"):
        true_or_false("enabled", value)
    with pytest.raises(BadRequestError, match=r"^latest = .* is neither True nor False$"):
        check_reset(ResetTo(latest=value))


def test_a_checkers_truth_is_any() -> None:
    """A numpy bool, from a comparison with a table's cell, is a valid result of a checker."""
    committed, rolled_back, unknown = TransactionResolution
    said = [True, False, np.True_, np.False_, None, "COMMIT", rolled_back]
    assert [resolution_of(each) for each in said] == [committed, rolled_back] * 2 + [unknown, committed, rolled_back]
    for wrong in (1, 0, "yes", np.array([True])):
        with pytest.raises(BadRequestError, match=r"^a checker said .*, which is no TransactionRes"):
            resolution_of(wrong)


def test_numpys_numbers_are_numbers() -> None:
    assert at_least_one("workers", np.int64(7)) == 7
    assert [milliseconds("timeout", seconds) for seconds in (np.float32(2), np.int64(2))] == [2000, 2000]
    with pytest.raises(BadRequestError):
        at_least_one("workers", np.int64(0))
    with pytest.raises(BadRequestError):
        milliseconds("timeout", np.float32("nan"))


@pytest.mark.parametrize("seconds", [Decimal("1.5"), Fraction(3, 2), np.float32(1.5), np.array(1.5)])
def test_a_wait_is_as_long_as_any_kind_of_number_says(seconds: Any) -> None:
    begun_s = time.monotonic()
    moment_s = moment_after("timeout", seconds)
    assert type(moment_s) is float
    assert begun_s + 1.5 <= moment_s <= time.monotonic() + 1.5


@pytest.mark.parametrize("seconds", ["1.5", None, np.array([1, 2]), Decimal("nan"), Decimal("snan"), 10**400])
def test_moment_after_refuses_values_without_number(seconds: Any) -> None:
    with pytest.raises(BadRequestError, match=r"^timeout = .* is no number of seconds$"):
        moment_after("timeout", seconds)


def test_consumers_refuse_them(group: Group) -> None:
    with group.client() as client:
        fill(client, "Amounts", 2, queues=1)
        refused: list[tuple[str, Callable[[Client], object]]] = [
            ("invisible_duration", lambda client: client.simple_consumer("s", "Amounts").receive(1, float("nan"))),
            ("timeout", lambda client: client.simple_consumer("s", "Amounts").receive(1, timeout=float("inf"))),
            ("session_timeout", lambda client: client.consumer("s", "Amounts", session_timeout=float("nan"))),
            ("session_timeout", lambda client: client.consumer("s", "Amounts", session_timeout=0)),
            ("session_timeout", lambda client: client.consumer("s", "Amounts", session_timeout=-1)),
            ("session_timeout", lambda client: client.consumer("s", "Amounts", session_timeout=301)),
            ("pull_messages", lambda client: client.consumer("s", "Amounts", pull_messages=0)),
            ("pull_messages", lambda client: client.consumer("s", "Amounts", pull_messages=-1)),
            ("name", lambda client: client.consumer("s", "Amounts", name=np.array(["a", "b"]))),
            ("broadcast", lambda client: client.consumer("s", "Amounts", broadcast="no")),
            ("rate", lambda client: client.replay("Amounts", "Again", rate=float("nan"))),
            ("position", lambda client: client.replay("Amounts", "Again", position=(0, 1.5))),
            ("position", lambda client: client.replay("Amounts", "Again", position=5)),
            ("retry_max_times", lambda client: client.groups.change("s", retry_max_times=-5)),
            ("retry_queue_nums", lambda client: client.groups.change("s", retry_queue_nums=-1)),
        ]
        for name, call in refused:
            with pytest.raises(BadRequestError, match=rf"^{name} = "):
                call(client)
        with client.consumer("amounts", "Amounts", start="earliest") as consumer:
            with pytest.raises(BadRequestError, match=r"^workers = 0 "):
                consumer.run(print, workers=0)
            with pytest.raises(BadRequestError, match=r"^max_messages = 0 "):
                consumer.receive(0)
            with pytest.raises(BadRequestError, match=r"^ordered = 'no' is neither"):
                consumer.receive(1, ordered="no")
            with pytest.raises(BadRequestError, match=r"^ordered = 'no' is neither"):
                consumer.run(print, ordered="no")
            assert len(consumer.receive(pa.scalar(2), timeout=PATIENCE_S)) == 2
        assert client.simple_consumer("s", "Amounts").receive(timeout=pa.scalar(0)) == []

    async def program() -> None:
        async with AsyncClient(group.store) as client, client.consumer("async-amounts", "Amounts") as consumer:
            with pytest.raises(BadRequestError, match=r"^workers = 0 "):
                await consumer.run(_handle, workers=0)
            with pytest.raises(BadRequestError, match=r"^max_messages = 0 "):
                await consumer.receive(0)
            with pytest.raises(BadRequestError, match=r"^ordered = 'no' is neither"):
                await consumer.receive(1, ordered="no")
            with pytest.raises(BadRequestError, match=r"^ordered = 'no' is neither"):
                await consumer.run(_handle, ordered="no")
            with pytest.raises(BadRequestError, match=r"^pull_messages = 0 "):
                await client.consumer("async-amounts", "Amounts", pull_messages=0)

    asyncio.run(program())


async def _handle(_message: object) -> None:
    raise AssertionError("unexpected request for messages")


def test_start_accepts_the_words_of_tail() -> None:
    assert [start_of(word) for word in ("beginning", "end")] == [start_of("earliest"), start_of("latest")]
    with pytest.raises(BadRequestError, match='start is "earliest", "latest" or a time'):
        start_of("begin")
