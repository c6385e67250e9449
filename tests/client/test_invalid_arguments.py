"""Invalid arguments raise BadRequestError that names them; numpy scalars are valid."""

from __future__ import annotations

import asyncio
import datetime
import math
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import mqproc
from mqproc import AsyncClient, Client, Message, ResetTo
from mqproc.errors import (
    BadMessageError,
    BadPropertyError,
    BadRequestError,
    BadTimeError,
    BadTopicError,
    ConfigurationError,
    FilterSyntaxError,
    FrameTooLargeError,
    MqprocError,
)
from mqproc.util.arguments import time_ms
from tests.client.memory_roles import MemoryRoles
from tests.support.group import PATIENCE_S, Group, fill

ARRAY = np.array(["a", "b"])
BODIES = [b"a", b"b"]
SERIES = pd.Series(BODIES)
EARLIEST = ResetTo(earliest=True)
Sent = Callable[[Client], object]


class Column:
    """As pandas has them: an array, but no sequence, and neither true nor false."""

    def __init__(self, values: list[Any]) -> None:
        self._values = np.array(values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self._values

    def __len__(self) -> int:
        return len(self._values)

    def __bool__(self) -> bool:
        raise ValueError("the truth value is ambiguous")


@pytest.mark.parametrize(
    ("send", "error", "expected"),
    [
        (lambda c: c.send(mqproc.Message("t", b"x", unique_id=5)), BadPropertyError, "unique id 5 is no text"),
        (
            lambda c: c.send_many([mqproc.Message("t", b"x", unique_id=b"5")] * 2),
            BadPropertyError,
            "unique id b'5' is no text",
        ),
        (lambda c: c.send_many([mqproc.Message("t", b"x")], in_flight=0), BadRequestError, "in_flight = 0 is out of"),
        (lambda c: list(c.send_batches([], in_flight=-1)), BadRequestError, "in_flight = -1 is out of range: 1 at"),
        (lambda c: c.send("t", b"x", queue_id="0"), BadRequestError, "queue_id = '0' is no whole number"),
        (lambda c: c.send("t", b"x", queue_id=1.5), BadRequestError, "queue_id = 1.5 is no whole number"),
        (lambda c: c.send("t", b"x", flag="1"), BadMessageError, "flag = '1' is no whole number"),
        (
            lambda c: c.send("t", b"x", born_timestamp_ms="5"),
            BadRequestError,
            "born_timestamp_ms = '5': Expected `int`",
        ),
        (lambda c: c.send("t", b"x", tag="\ud800"), BadRequestError, "tag = .* cannot be sent: 'utf-8'"),
        (lambda c: c.send("t", b"x", keys="\ud800"), BadPropertyError, "keys = .*: 'utf-8'"),
        (lambda c: c.send("t", b"x", keys=ARRAY), BadPropertyError, "keys must be a sequence of texts"),
        (lambda c: c.send(Message("t", b"x", keys=ARRAY)), BadPropertyError, "keys must be a sequence of texts"),
        (lambda c: c.send_many([Message("t", b"x", keys=ARRAY)]), BadPropertyError, "keys must be a sequence of texts"),
        (
            lambda c: c.send("t", b"x", properties=[("a", "b")]),
            BadPropertyError,
            "properties must be a mapping .* list",
        ),
        (lambda c: c.send("t", b"x", keys=pd.NA), BadPropertyError, "and properties a mapping, not .'NAType"),
        (lambda c: c.send("t", b"x", tag=pd.NA), BadPropertyError, "tag = <NA>"),
        (lambda c: c.send(Message("t", b"x", unique_id=pd.NA)), BadPropertyError, "unique id <NA> is no text"),
        (lambda c: c.send(Message("t", b"x", unique_id=ARRAY)), BadPropertyError, "unique id .* is no text"),
        (lambda c: c.send("t", b"x", sharding_key=pd.NA), BadPropertyError, "sharding key <NA> is no text"),
        (lambda c: c.send(pd.NA, b"x"), BadTopicError, "topic is <NA>, not text"),
        (lambda c: c.send("t", b"x", flag=pd.NA), BadMessageError, "flag = <NA> is no whole number"),
        (lambda c: c.send("t", b"x", queue_id=np.array([0, 1])), BadRequestError, "queue_id = array.* no whole number"),
        (lambda c: c.send_batch("t", BODIES, queue_id=np.array([0, 1])), BadRequestError, "queue_id = array"),
        (lambda c: c.send_many([Message(["t"], b"x")]), BadRequestError, "item 0 is no Message that can be sent"),
        (lambda c: c.send_many([Message("t", b"x", delay_level=pd.NA)]), BadRequestError, "item 0 is no Message that"),
        (lambda c: c.send(["t"], b"x"), BadTopicError, r"topic is \['t'\], not text"),
        (lambda c: c.send_batch(["t"], BODIES), BadTopicError, r"topic is \['t'\], not text"),
        (lambda c: c.send_batch("t", BODIES, keys=["a", pd.NA]), BadPropertyError, "message 1: keys must be a seq"),
        (lambda c: c.send_batch("t", BODIES, queue_id=0, queue_ids=[0, 1]), BadRequestError, "not both"),
        (lambda c: c.send_batch("t", BODIES, delay=np.array(["2030-01-01"] * 2, "M8[D]")), BadTimeError, "deliver_at"),
        (lambda c: c.send_batch("t", BODIES, delay=10**400), BadTimeError, "a delay is a number of seconds"),
        (lambda c: c.count("t", Decimal("nan")), BadRequestError, "no time is a Decimal"),
        (lambda c: c.wait_dispatched(10**400), BadRequestError, "timeout = 1000.* is no number of seconds"),
        (
            lambda c: c.send("t", b"x", properties=Column(["a"] * 2)),
            BadPropertyError,
            "properties a mapping, not",
        ),
        (lambda c: c.send("t", b"x", delay_level=Column([1, 2])), BadMessageError, "delay_level is a Column"),
        (lambda c: c.send("t", b"x", delay=Column([1, 2])), BadTimeError, "a Column is no list or array"),
        (lambda c: c.send("t", "text"), BadMessageError, r"body must be bytes, not str; give its encode\(\)"),
        (lambda c: c.send("t", np.str_("text")), BadMessageError, r"body must be bytes, not str_; give its encode\(\)"),
        (lambda c: c.send("t", np.int64(5)), BadMessageError, "body must be bytes, not int64"),
        (lambda c: c.send("t", np.datetime64("2027-01-01")), BadMessageError, "body must be bytes, not datetime64"),
        (lambda c: c.send_batch("t", [b"", "text"]), BadMessageError, r"body 1 is a str, not bytes; give its enc"),
        (lambda c: c.send_batch("t", [b"", np.str_("te")]), BadMessageError, r"body 1 is a str_, not bytes; give"),
        (lambda c: c.send_batch("t", [b"", *np.arange(2)]), BadMessageError, "body 1 is a int64, not bytes: a num"),
        (lambda c: c.send_batch("t", SERIES), BadMessageError, r"not Series; give its to_list\(\)"),
        (lambda c: c.send_batch("t", BODIES, tags=SERIES), BadPropertyError, r"not Series; give its to_list\(\)"),
        (lambda c: c.send_batch("t", BODIES, delay=SERIES), BadTimeError, "a delay is a number of seconds or"),
        (lambda c: c.send_batch("t", BODIES, delay=pd.Series([1, 2])), BadTimeError, r"array; give its to_list\(\)"),
        (lambda c: c.send_batch("t", BODIES, deliver_at=SERIES), BadTimeError, r"not Series; give its to_list\(\)"),
        (lambda c: c.count("t", True), BadRequestError, "no time is a bool, True"),
        (lambda c: c.count("t", np.True_), BadRequestError, "no time is a bool"),
        (lambda c: c.send("t", b"x", deliver_at=True), BadRequestError, "no time is a bool, True"),
        (lambda c: c.send("t", b"x", delay=True), BadTimeError, "booleans are no seconds"),
        (lambda c: c.send_batch("t", BODIES, delay=[True, False]), BadTimeError, "booleans are no seconds"),
        (lambda c: c.send("t", b"x", delay="5m"), BadTimeError, "a number of seconds or a timedelta.*: '5m' is text"),
        (lambda c: c.send("t", b"x", deliver_at=datetime.date(2027, 1, 1)), BadRequestError, "no time is a date"),
        (
            lambda c: c.send("t", b"x", deliver_at=np.datetime64("2027-01-01")),
            BadRequestError,
            "no time is a datetime64",
        ),
        (lambda c: c.send("t", b"x", deliver_at=math.nan), BadRequestError, "no time is a float, nan"),
        (
            lambda c: c.send_oneway("t", bytes(1 << 26)),
            FrameTooLargeError,
            r"frame of 67,108,\d+ bytes exceeds 67,108,864",
        ),
        (lambda c: c.send_many(["x"]), BadRequestError, "item 0 is no Message that can be sent: 'x'"),
        (lambda c: c.send_many([Message("t", b""), None]), BadRequestError, "item 1 is no Message .*: None"),
        (lambda c: c.send_batch("t", BODIES, queue_id="0"), BadRequestError, "queue_id = '0' is no whole number"),
        (lambda c: c.simple_consumer(ARRAY, "t"), BadRequestError, "group is array.*, not text"),
        (lambda c: c.simple_consumer("g", "t", start=ARRAY), BadRequestError, 'start is "earliest", "latest" or a'),
        (lambda c: c.replay("\ud800", "u"), BadRequestError, "topic = .* is no text, or none in UTF-8"),
        (lambda c: c.replay("t", ["u"]), BadRequestError, r"to = \['u'\] is no text"),
        (lambda c: c.replay("t", "u", key=ARRAY), BadRequestError, "key = array.* is no text"),
        (lambda c: c.replay("t", "u", name="\ud800"), BadRequestError, "name = .* is no text"),
        (lambda c: c.producer().send("t", b"x", timeout="1"), BadRequestError, "timeout = '1' is no number of seconds"),
        (lambda c: c.producer().flush("1"), BadRequestError, "timeout = '1' is no number of seconds"),
        (lambda c: c.producer().close(math.nan), BadRequestError, "timeout = nan is no number of seconds"),
        (lambda c: c.send_batch("t", BODIES, tags="\ud800"), BadRequestError, "tag = .* cannot be sent"),
        (lambda c: c.send_batch("t", BODIES, properties={"a": "\ud800"}), BadPropertyError, "properties: 'utf-8'"),
        (lambda c: c.send_batch("t", BODIES, properties=Column([1, 2])), BadPropertyError, "not a Column"),
        (lambda c: c.send_batch("t", BODIES, properties=np.array([{}, {}])), BadPropertyError, "not a ndarray"),
        (
            lambda c: c.send_batch("t", BODIES, properties=pa.array([{"a": "b"}] * 2)),
            BadPropertyError,
            "not a StructArray",
        ),
        (lambda c: c.send_batch("t", BODIES, properties=({} for _ in BODIES)), BadPropertyError, "not a generator"),
        (lambda c: c.send_batch("t", BODIES, properties=[{}, 5]), BadPropertyError, "not a int: 5"),
        (lambda c: c.send_batch("t", BODIES, deliver_at=Column([1, 2])), BadRequestError, "no time is a Column"),
        (lambda c: c.send_batch("t", BODIES, delay=Column([1, 2])), BadTimeError, "a Column is no list or array"),
        (lambda c: c.pull("t", 0, "0"), BadRequestError, "options of PULL: offset = '0': Expected `int`"),
        (lambda c: c.pull("t", 0, 0, max_bytes="5"), BadRequestError, "max_bytes = '5' is no whole number"),
        (lambda c: c.pull_arrow("t", 0, 0, max_bytes=None), BadRequestError, "max_bytes = None is no whole number"),
        (lambda c: Client("s", max_frame_bytes="5"), BadRequestError, "max_frame_bytes = '5' is out of range: 1"),
        (lambda c: c.pull("t", 0, 0, timeout=None), BadRequestError, "timeout = None is no number of seconds"),
        (lambda c: c.pull("t", 0, 0, timeout=math.nan), BadRequestError, "timeout = nan is no number of seconds"),
        (lambda c: c.pull("t", 0, 0, filter=mqproc.SqlFilter(None)), FilterSyntaxError, "filter None is not text"),
        (lambda c: c.count("t", tags=5), FilterSyntaxError, "filter 5 is not text"),
        (lambda c: c.count("t", begin=[1]), BadRequestError, "no time is a list"),
        (lambda c: c.send("t", b"x", queue_id=Decimal("nan")), BadRequestError, "queue_id = Decimal"),
        (lambda c: c.send("t", b"x", flag=Decimal("nan")), BadMessageError, "flag = Decimal.* is no whole number"),
        (lambda c: c.send("t", b"x", deliver_at=[["a"], ["b", 1]]), BadTimeError, "deliver_at is one time, or"),
        (lambda c: c.send("t", b"x", delay=1j), BadTimeError, "complex numbers are no seconds"),
        (lambda c: c.send("t", b"x", properties={"a": "b"}, born_timestamp_ms=[1]), BadMessageError, r"ms = \[1\] is"),
        (lambda c: c.send_many(None), BadRequestError, "messages = None: give a list"),
        (lambda c: c.send_many([Message("t", b""), Message("t", b"", flag=pd.NA)]), BadMessageError, "message 1: flag"),
        (
            lambda c: c.send_many([Message("t", b"", properties={"a": "b"}), Message("t", b"", properties=ARRAY)]),
            BadPropertyError,
            "message 1: properties must be a mapping of names to values, not a ndarray",
        ),
        (
            lambda c: c.send_many([Message("u", b""), Message("t", b""), Message("t", b"", unique_id=pd.NA)]),
            BadPropertyError,
            "message 2: unique id <NA> is no text",
        ),
        (
            lambda c: c.send_many([Message("t", b""), Message("t", b"", born_timestamp_ms=ARRAY)]),
            BadMessageError,
            "message 1: born_timestamp_ms = array.* is no whole number",
        ),
        (
            lambda c: c.send_many([Message("t", b"", tag="x"), Message("t", b"", tag=math.nan)]),
            BadPropertyError,
            "message 1: tag nan is no text",
        ),
        (
            lambda c: c.send_many([Message("u", b""), Message("t", b""), Message("t", b"", tag="\ud800")]),
            BadRequestError,
            "message 2: tag = .* cannot be sent",
        ),
        (lambda c: c.send_many([Message("t", b""), Message("t", b"", flag=1.5)]), BadMessageError, "message 1: flag"),
        (
            lambda c: c.send_many([*[Message("t", b"")] * 1500, Message("t", bytes(5 << 20))]),
            mqproc.MessageTooLargeError,
            "message 1,500: body of 5,242,880 bytes",
        ),
        (lambda c: list(c.send_batches(None)), BadRequestError, "batches = None: give a list"),
        (lambda c: list(c.send_batches([mqproc.Batch("t", BODIES), 5])), BadRequestError, "item 1 is no Batch: 5"),
        (
            lambda c: list(c.send_batches([mqproc.Batch("t", BODIES, unique=pd.NA)])),
            BadRequestError,
            "unique = <NA>: give None, or a prefix and the first counter",
        ),
        (lambda c: c.send_batch("t", BODIES, properties={pd.NA: "a"}), BadPropertyError, "property <NA> = 'a'"),
        (
            lambda c: c.send_batch("t", BODIES, tags=["a", pd.NA], properties=[{}, {}]),
            BadPropertyError,
            "message 1: tag <NA> is no text",
        ),
        (
            lambda c: c.send_batch("t", np.ma.array([b"a", b"b"], mask=[0, 1])),
            BadMessageError,
            "bodies: 1 of 2 are masked",
        ),
        (
            lambda c: c.send_batch("t", BODIES, flags=np.ma.array([1, 2], mask=[0, 1])),
            BadMessageError,
            "flags: 1 of 2 are masked",
        ),
        (
            lambda c: c.send_batch("t", BODIES, flags=[1, None]),
            BadMessageError,
            "flags: None of message 1: object are no whole numbers",
        ),
        (
            lambda c: c.send_batch("t", BODIES, born_timestamps_ms=[5, 1.5]),
            BadMessageError,
            "born times: 1.5 of message 1: float64 are no whole",
        ),
        (
            lambda c: c.send_batch("t", BODIES, flags=[1, 1 << 40]),
            BadMessageError,
            "flags: 1099511627776 of message 1: 1…1,099,511,627,776 do not fit 32 bits",
        ),
        (
            lambda c: c.send_batch("t", BODIES, queue_ids=[0, -5]),
            mqproc.NoSuchQueueError,
            "queue id -5 of message 1 is below 0",
        ),
        (
            lambda c: c.send_batch("t", BODIES, flags=pa.array([1, None])),
            BadMessageError,
            "flags: None of message 1: float64 are no whole",
        ),
        (
            lambda c: c.send_batch("t", [*[b""] * 70_000, bytes(5 << 20), b""]),
            mqproc.MessageTooLargeError,
            "message 70,000: body of 5,242,880 bytes",
        ),
        (
            lambda c: c.send_batch("t", [b"", bytes(5 << 20), b""], deliver_at=[2, 3, 1]),
            mqproc.MessageTooLargeError,
            "message 1: body of 5,242,880 bytes",
        ),
        (lambda c: c.send("t", b"x", delay=-1), BadTimeError, "a delay is below 0"),
        (lambda c: c.send_batch("t", BODIES, delay=[1, -1]), BadTimeError, "a delay is below 0"),
        (lambda c: c.max_offset(pd.NA, 0), BadTopicError, "topic is <NA>, not text"),
        (lambda c: c.min_offset("t", ARRAY), BadRequestError, "queue_id = array.* is no whole number"),
        (lambda c: c.by_key("t", pd.NA), BadRequestError, "key = <NA> cannot be sent"),
        (lambda c: c.count("t", time=pd.NA), BadRequestError, "time is <NA>, neither 'store' nor 'born'"),
        (lambda c: c.pull("t", 0, 0, timeout=pa.scalar("x")), BadRequestError, "timeout = .* is no number of seconds"),
        (lambda c: c.pull_arrow("t", 0, 0, columns=5), BadRequestError, "columns = 5: give a list"),
        (lambda c: c.pull_arrow("t", 0, 0, columns=[pd.NA]), BadRequestError, "no column is called <NA>"),
        (lambda c: list(c.scan("t", properties=ARRAY)), BadPropertyError, "properties must be a mapping .* ndarray"),
        (lambda c: c.create_topic("u", "3"), BadRequestError, "CREATE_TOPIC: queues = '3': Expected `int`"),
        (lambda c: list(c.scan("t", properties=["a"])), BadPropertyError, "properties must be a mapping .* list"),
        (lambda c: c.consumer("g", None), BadRequestError, "topics = None: give a topic, or a list of them"),
        (
            lambda c: c.transaction_producer("g", None),
            BadRequestError,
            "checker must be a function of a message, not None",
        ),
        (lambda c: c.transaction("g", None), BadRequestError, "a transaction has a Message, not a NoneType"),
        (
            lambda c: c.transaction("g", Message("t", b""), check_immunity_time="5"),
            BadRequestError,
            "_time = '5' is out",
        ),
        (lambda c: c.count("t", datetime.datetime.min), BadRequestError, "datetime.* has no Unix time"),
        (lambda c: c.count("t", "0001-01-01"), BadRequestError, "datetime.* has no Unix time"),
        (lambda c: c.count("t", pd.NaT), BadRequestError, "NaT has no Unix time"),
        (lambda c: c.send("t", b"x", deliver_at=pd.NaT), BadRequestError, "NaT has no Unix time"),
        (lambda c: c.count("t", pl.Series([b"x"])), BadRequestError, "no time is a Series"),
        (lambda c: c.max_offset("", 0), BadTopicError, "topic is empty"),
        (lambda c: c.min_offset("", 0), BadTopicError, "topic is empty"),
        (lambda c: c.pull_arrow("t", 0, 0, columns="body"), BadRequestError, "columns = 'body': give a list of names"),
        (lambda c: c.wait_dispatched(None), BadRequestError, "timeout = None is no number of seconds"),
        (lambda c: c.wait_dispatched(math.nan), BadRequestError, "timeout = nan is no number of seconds"),
        (lambda c: Client(""), BadRequestError, "path is empty"),
        (lambda c: AsyncClient(""), BadRequestError, "path is empty"),
        (lambda c: Client(5), BadRequestError, "the store's path is 5, which is not a path"),
        (lambda c: AsyncClient(b"s"), BadRequestError, "the store's path is b's', which is not a path"),
        (lambda c: mqproc.open(None), BadRequestError, "the store's path is None, which is not a path"),
        (lambda c: mqproc.open("a\0b"), BadRequestError, "the store's path .* is not a path: it contains byte 0"),
        (lambda c: Client("a\ud800"), BadRequestError, "the store's path .* is not a path: 'utf-8'"),
        (lambda c: mqproc.StoreReader(None), BadRequestError, "the store's path is None, which is not a path"),
        (lambda c: Client("s", max_spin_us=None), BadRequestError, "max_spin_us = None is out of range: 0 at least"),
        (lambda c: mqproc.open("s", options=["a=b"]).__enter__(), BadRequestError, "options must be a mapping .* list"),
        (lambda c: mqproc.open("s", options={"nope": 1}), ConfigurationError, "options: no option is called 'nope'"),
        (lambda c: mqproc.open("s", options={"max_queues": "x"}), ConfigurationError, "options: max_queues = 'x' is"),
        (lambda c: c.groups.plan_reset("g", "earliest"), BadRequestError, "to = 'earliest' is no ResetTo"),
        (lambda c: c.groups.plan_reset("g", ResetTo(offset="5")), BadRequestError, "offset = '5' is no whole number"),
        (lambda c: c.groups.plan_reset("g", ResetTo(shift=1.5)), BadRequestError, "shift = 1.5 is no whole number"),
        (lambda c: c.groups.plan_reset("g", EARLIEST, queues=5), BadRequestError, "queues = 5: give a list"),
        (lambda c: c.groups.execute("g", 5), BadRequestError, "moves = 5: give a list"),
        (lambda c: c.groups.execute("g", [("t", 0, 1)]), BadRequestError, r"item 0 of moves is no Move: \('t', 0, 1\)"),
        (lambda c: c.groups.change("g", retry_max_times="x"), BadRequestError, "retry_max_times = 'x' is no whole"),
        (lambda c: list(c.groups.dead_letters(5)), BadRequestError, "group is 5, not text"),
    ],
)
def test_client_invalid_argument_raises_bad_request(
    client: Client, send: Sent, error: type[MqprocError], expected: str
) -> None:
    with pytest.raises(error, match=expected) as caught:
        send(client)
    assert type(caught.value) is error


def test_async_send_many_invalid_message_names_its_place(roles: MemoryRoles) -> None:
    async def run() -> None:
        async with AsyncClient(roles.store, timeout=PATIENCE_S) as client:
            with pytest.raises(BadMessageError, match="message 1: flag = <NA> is no whole number"):
                await client.send_many([Message("t", b""), Message("t", b"", flag=pd.NA)])
            with pytest.raises(BadPropertyError, match="message 2: unique id <NA> is no text"):
                await client.send_many([Message("u", b""), Message("t", b""), Message("t", b"", unique_id=pd.NA)])
            with pytest.raises(mqproc.MessageTooLargeError, match="message 70,000: body of 5,242,880 bytes"):
                await client.send_batch("t", [*[b""] * 70_000, bytes(5 << 20)])
            with pytest.raises(BadRequestError, match="item 0 is no Batch: 5"):
                await anext(aiter(client.send_batches([5])))  # type: ignore[list-item]
            with pytest.raises(mqproc.MessageTooLargeError, match="message 1,500: body of 5,242,880 bytes"):
                await client.send_many([*[Message("t", b"")] * 1500, Message("t", bytes(5 << 20))])
            with pytest.raises(BadMessageError, match=r"born_timestamp_ms = .* is no whole number"):
                await client.producer().send("t", b"", born_timestamp_ms=ARRAY)  # type: ignore[arg-type]

    asyncio.run(run())


def test_a_producer_refuses_a_born_time_that_would_end_its_thread(client: Client) -> None:
    with client.producer() as producer:
        with pytest.raises(BadMessageError, match=r"born_timestamp_ms = \[1\] is no whole number"):
            producer.send("t", b"", born_timestamp_ms=[1])  # type: ignore[arg-type]
        future = producer.send("t", b"x", born_timestamp_ms=np.int64(5))
    assert future.result().queue_offset == 0


def test_a_naive_moment_of_pandas_is_local_time_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        for text in ("2026-01-01T08:00", "2026-07-01T08:00:00.250"):
            moments = pd.Timestamp(text), datetime.datetime.fromisoformat(text), text
            assert len({time_ms(moment, 0) for moment in moments}) == 1
        assert time_ms(pd.Timestamp("2026-01-01T08:00", tz="UTC"), 0) == 1_767_254_400_000
    finally:
        monkeypatch.undo()
        time.tzset()


def test_numpys_scalars_are_numbers_and_texts(client: Client, roles: MemoryRoles) -> None:
    client.create_topic(np.str_("orders"), np.int64(3))
    sent = client.send(
        "orders",
        b"x",
        tag=np.str_("t"),
        keys=np.str_("k"),
        queue_id=np.int64(2),
        flag=np.int16(7),
        born_timestamp_ms=np.int64(99),
    )
    stored = roles.messages[0]
    assert (sent.queue_id, stored.tag, stored.keys, stored.flag, stored.born_timestamp_ms) == (2, "t", ("k",), 7, 99)
    client.send_batch("orders", BODIES, tags=np.str_("t"), queue_id=np.int64(2))
    assert len(client.pull("orders", np.int64(2), np.uint32(1), np.int8(5)).messages) == 2
    assert len(client.by_key("orders", np.str_("k"), max_messages=np.int64(4))) == 1


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return Group(tmp_path / "store")


def test_consumer_invalid_argument_raises_bad_request(group: Group, tmp_path: Path) -> None:
    group.start()
    try:
        with group.client() as client:
            fill(client, "Mistakes", 2, queues=1)
            with client.consumer("mistakes", "Mistakes", start="earliest") as consumer:
                _check_consumer(consumer, consumer.receive(2, timeout=PATIENCE_S))
            with client.consumer("mistakes", "Mistakes") as consumer:
                assert len(consumer.receive(2, timeout=PATIENCE_S)) == 2, "an ack with an invalid message does none"
            _check_simple_consumer(client)
            _check_settings_and_transactions(client)
            _check_dead_letters(client)
            _one_topic_is_no_list_of_letters(client)
            _check_paths(client, tmp_path)
        asyncio.run(_check_async_consumer(group))
    finally:
        group.close()


def _check_consumer(consumer: mqproc.Consumer, messages: Any) -> None:
    for expected, call in (
        ("a list is no StoredMessage", lambda: consumer.ack(messages)),
        ("a NoneType is no StoredMessage", lambda: consumer.ack(None)),
        ("a str is no StoredMessage", lambda: consumer.ack(*messages, "x")),
        ("a list is no StoredMessage", lambda: consumer.nack(messages)),
        ("to = 'earliest' is no ResetTo", lambda: consumer.seek("earliest")),
        ("timeout = None is no number", lambda: consumer.receive(timeout=None)),
        ("timeout = '1' is no number", lambda: next(consumer.messages(timeout="1"))),
        ("handler = None cannot be called", lambda: consumer.run(None)),
        ("pause_s = -1 is out of range", lambda: consumer.run(print, pause_s=-1)),
        ("stop = <asyncio.* is no threading.Event", lambda: consumer.run(print, stop=asyncio.Event())),
        ("stop = 5 is no threading.Event", lambda: consumer.run(print, stop=5)),
    ):
        with pytest.raises(BadRequestError, match=expected):
            call()


def _check_simple_consumer(client: Client) -> None:
    simple = client.simple_consumer("simple", "Mistakes")
    for given in ([], None, "x"):
        with pytest.raises(BadRequestError, match=f"a {type(given).__name__} is no StoredMessage"):
            simple.ack(given)
        with pytest.raises(BadRequestError, match=f"a {type(given).__name__} is no StoredMessage"):
            simple.change_invisible_duration(given, 30)
    assert simple.receive(np.int64(2)) == []


def _check_settings_and_transactions(client: Any) -> None:
    for expected, call in (
        ("enabled = 'yes' is neither True nor False", lambda: client.groups.change("simple", enabled="yes")),
        ("a list is no OpenTransaction", lambda: client.transactions.check([])),
        ("a NoneType is no OpenTransaction", lambda: client.transactions.commit(None)),
    ):
        with pytest.raises(BadRequestError, match=expected):
            call()


def _check_dead_letters(client: Client) -> None:
    """Only dead letters of the group are sent again, not messages at their offsets."""
    others = list(client.range("Mistakes"))
    for given, expected in (
        (others[1], "Mistakes offset 1 is no dead letter of group mistakes: %DLQ%mistakes has those"),
        ([], "a list is no StoredMessage"),
    ):
        with pytest.raises(BadRequestError, match=expected):
            client.groups.resend("mistakes", given)


def _one_topic_is_no_list_of_letters(client: Client) -> None:
    """Nor does it mean topics whose names are within its own."""
    fill(client, "Mist", 2, queues=1)
    with client.consumer("one", ["Mistakes", "Mist"], start="earliest") as consumer:
        consumer.seek(mqproc.ResetTo(latest=True), "Mistakes")
        assert consumer.positions()["Mist", 0] == 0
        assert consumer.positions()["Mistakes", 0] == 2
    (move,) = client.groups.plan_reset("one", mqproc.ResetTo(latest=True), "Mist")
    assert (move.topic, move.after) == ("Mist", 2)
    assert {move.topic for move in client.groups.plan_clone("one", "two", "Mist")} == {"Mist"}
    with pytest.raises(BadRequestError, match="topics = 5: give a topic, or a list of them"):
        client.groups.plan_reset("one", mqproc.ResetTo(latest=True), 5)  # type: ignore[arg-type]


def _check_paths(client: Client, folder: Path) -> None:
    (folder / "file").touch()
    for path, expected in ((folder, "is a folder"), (folder / "file" / "x", "can be no file: Not a directory")):
        with pytest.raises(BadRequestError, match=f"^offsets_path = {str(path)!r} {expected}"):
            client.consumer("broadcast", "Mistakes", broadcast=True, offsets_path=path)
    assert not folder.with_name(folder.name + ".lock").exists()


async def _check_async_consumer(group: Group) -> None:
    async with AsyncClient(group.store) as client, client.consumer("async", "Mistakes") as consumer:
        with pytest.raises(BadRequestError, match="a list is no StoredMessage"):
            await consumer.ack([])
        with pytest.raises(BadRequestError, match="a list is no StoredMessage"):
            await consumer.nack([])
        with pytest.raises(BadRequestError, match="handler = 'x' cannot be called"):
            await consumer.run("x")
        with pytest.raises(BadRequestError, match=r"stop = <threading.* is no asyncio\.Event"):
            await consumer.run(print, stop=threading.Event())
        with pytest.raises(BadRequestError, match="timeout = None is no number"):
            await consumer.receive(timeout=None)
