"""Reads as lazy Arrow streams: the same from a client and from the files."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import zlib
from collections.abc import Callable
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest

from mqproc import AsyncClient, Client, SqlFilter, StoreReader
from mqproc.arrow.batches import message_columns, record_batch, sent_batches
from mqproc.arrow.columns import MESSAGE_COLUMNS, USER_COLUMNS
from mqproc.arrow.reading import as_pandas, as_polars
from mqproc.client import read_requests
from mqproc.errors import (
    BadMessageError,
    BadRequestError,
    BadTopicError,
    ConfigurationError,
    CorruptStoreError,
    NoSuchQueueError,
    OffsetOutOfRangeError,
    TopicNotFoundError,
)
from mqproc.kernels import record_decode
from mqproc.layout import record
from mqproc.types import StoredMessage
from tests.support.group import PATIENCE_S, Group
from tests.support.records import encode_record

COUNT = 1000
TAGS = ("red", "grün", "", "blue")
READS: list[dict[str, Any]] = [
    {},
    {"queue_ids": 1},
    {"queue_ids": [2, 0]},
    {"starting_offsets": {0: 3}, "ending_offsets": {0: 5, 1: 0}},
    {"tags": "red || grün"},
    {"filter": SqlFilter("n < 10")},
    {"filter": SqlFilter("n < 10"), "starting_offsets": {0: 2}, "ending_offsets": {0: 3}},
    {"begin": 1_000_000_000_400, "end": 1_000_000_000_600, "time": "born"},
    {"columns": "all"},
    {"columns": ["message_id", "body"]},
]


@pytest.fixture(scope="module")
def topic(shared: Group) -> str:
    """A topic with messages of four tags, in three queues."""
    with Client(shared.store) as client:
        client.create_topic("colours", 3)
        for number in range(COUNT):
            client.send(
                "colours",
                b"%d" % number,
                tag=TAGS[number % 4],
                keys=[f"k{number}", "all"],
                properties={"n": str(number)},
                queue_id=number % 3,
                born_timestamp_ms=1_000_000_000_000 + number,
            )
        client.wait_dispatched()  # Other clients do not wait for these sends.
    return "colours"


def rows_of(messages: list[StoredMessage]) -> list[dict[str, Any]]:
    """Objects as the rows of a table with the user's columns."""
    return [
        {
            "topic": message.topic,
            "queue_id": message.queue_id,
            "queue_offset": message.queue_offset,
            "keys": list(message.keys),
            "tag": message.tag or None,
            "body": message.body,
            "properties": list(message.properties.items()),
            "born_timestamp": message.born_timestamp_ms,
            "store_timestamp": message.store_timestamp_ms,
        }
        for message in messages
    ]


def rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows of a table, with times in ms."""
    for name in ("born_timestamp", "store_timestamp"):
        table = table.set_column(table.column_names.index(name), name, table[name].cast("int64"))
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def test_read_gives_the_messages_of_a_range(shared: Group, topic: str) -> None:
    with Client(shared.store) as client:
        stream = client.read(topic)
        assert tuple(stream.schema.names) == USER_COLUMNS
        assert stream.schema.field("tag").type == pa.dictionary(pa.int32(), pa.string())
        assert stream.schema.field("store_timestamp").type == pa.timestamp("ms", "UTC")
        assert rows(stream.to_arrow()) == rows_of(list(client.range(topic)))
        assert stream.ending_offsets == {0: 334, 1: 333, 2: 333}
        assert repr(stream) == (
            "<ArrowStream of colours: up to 1,000 messages, columns topic, queue_id, queue_offset, keys, tag, body, "
            "properties, born_timestamp, store_timestamp>"
        )
        middle = client.pull(topic, 1, 100, 1).messages[0].store_timestamp_ms
        early, late = client.read(topic, end=middle).to_arrow(), client.read(topic, begin=middle).to_arrow()
        assert rows(early) == rows_of(list(client.range(topic, end=middle)))
        assert rows(late) == rows_of(list(client.range(topic, begin=middle)))
        assert len(early) + len(late) == COUNT


@pytest.mark.parametrize("arguments", READS, ids=str)
def test_client_and_files_and_async_client_read_the_same(shared: Group, topic: str, arguments: dict[str, Any]) -> None:
    async def read() -> pa.Table:
        async with AsyncClient(shared.store) as client:
            stream = await client.read(topic, **arguments)
            assert stream.ending_offsets
            return await stream.to_arrow()

    with Client(shared.store) as client, StoreReader(shared.store) as reader:
        table = client.read(topic, **arguments).to_arrow()
        table.validate(full=True)
        found = table.to_pylist()
        assert found == reader.read(topic, **arguments).to_arrow().to_pylist()
        assert found == asyncio.run(read()).to_pylist()
        numbers = [int(body) for body in table["body"].to_pylist()]
    assert sorted(numbers) == [number for number in range(COUNT) if is_selected(number, arguments)]


def is_selected(number: int, arguments: dict[str, Any]) -> bool:
    queue_id, offset = number % 3, number // 3
    queue_ids = arguments.get("queue_ids", (0, 1, 2))
    born = number + 1_000_000_000_000
    return (
        queue_id in ([queue_ids] if isinstance(queue_ids, int) else queue_ids)
        and arguments.get("starting_offsets", {}).get(queue_id, 0) <= offset
        and offset < arguments.get("ending_offsets", {}).get(queue_id, COUNT)
        and arguments.get("begin", 0) <= born < arguments.get("end", 1 << 60)
        and ("filter" not in arguments or number < 10)
        and ("tags" not in arguments or number % 4 < 2)
    )


def test_read_is_lazy_and_bounded_by_the_offsets_of_its_call(shared: Group) -> None:
    with Client(shared.store) as client:
        client.send_batch("growing", [b"x" * 100_000] * 200, queue_id=0)
        stream = client.read("growing", columns=["body"])
        client.send("growing", b"later", queue_id=0)
        batches = iter(stream)
        assert 0 < next(batches).num_rows < 200
        assert sum(batch.num_rows for batch in stream) == len(stream.to_arrow()) == 200
        assert client.read("growing", starting_offsets=stream.ending_offsets).to_arrow()["body"].to_pylist() == [
            b"later"
        ]


def test_read_continues_after_a_pause_and_may_be_left(
    shared: Group, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next page is asked for ahead; an answer that waits too long is asked for again."""
    monkeypatch.setattr(read_requests, "PAGE_MESSAGES", 100)
    with Client(shared.store) as client:
        whole = client.read(topic).to_arrow()
        stream = client.read(topic)
        monkeypatch.setattr(read_requests, "_KEPT_S", -1.0)
        assert [batch.num_rows for batch in stream] == [100, 100, 100, 34, *[100, 100, 100, 33] * 2]
        assert stream.to_arrow().equals(whole)
        monkeypatch.undo()
        next(iter(stream))
        assert stream.to_arrow().equals(whole)


def test_forked_process_continues_a_read_beside_its_parent(
    shared: Group, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_requests, "PAGE_MESSAGES", 100)
    with Client(shared.store) as client:
        batches = iter(client.read(topic))
        next(batches)
        context = multiprocessing.get_context("fork")
        rows, child_rows = context.Pipe(duplex=False)
        child = context.Process(target=lambda: child_rows.send(sum(batch.num_rows for batch in batches)))
        child.start()
        assert rows.poll(PATIENCE_S)
        assert rows.recv() == sum(batch.num_rows for batch in batches) == COUNT - 100
        child.join(PATIENCE_S)


def test_stream_is_no_array(shared: Group, topic: str) -> None:
    """pandas would make one cell of each batch."""
    import pandas

    with Client(shared.store) as client, pytest.raises(BadRequestError, match=r"to_pandas\(\)"):
        pandas.DataFrame(client.read(topic))


@pytest.mark.filterwarnings("default")
def test_polars_duckdb_and_pandas_take_the_stream(shared: Group, topic: str) -> None:
    with Client(shared.store) as client:
        stream = client.read(topic)
        frames = pl.from_arrow(stream), pl.DataFrame(stream), stream.to_polars()
        for frame in frames:
            assert isinstance(frame, pl.DataFrame)
            assert frame.shape == (COUNT, len(USER_COLUMNS))
            assert frame["tag"].cast(pl.String).to_list()[:3] == ["red", "blue", None]
        for _ in range(2):
            found = duckdb.sql("select tag, count(*), count(distinct body) from stream group by tag order by tag")
            assert found.fetchall() == [("blue", 250, 250), ("grün", 250, 250), ("red", 250, 250), (None, 250, 250)]
        pandas = stream.to_pandas()
        assert pandas.groupby("tag", observed=True).size().to_dict() == {"red": 250, "grün": 250, "blue": 250}
        client.create_topic("empty", 2)
        empty = client.read("empty")
        assert pl.from_arrow(empty).shape == (0, len(USER_COLUMNS))  # type: ignore[union-attr]
        assert duckdb.sql("from empty").fetchall() == []
        assert list(empty.to_pandas().columns) == list(USER_COLUMNS)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"topic": "nowhere"}, TopicNotFoundError, "no topic 'nowhere'"),
        ({"topic": ""}, BadTopicError, "topic = '' is no name"),
        ({"queue_ids": 3}, NoSuchQueueError, "topic 'colours' has no queue 3; it has 3"),
        ({"queue_ids": ["0"]}, BadRequestError, "queue_ids = '0' is no whole number"),
        ({"starting_offsets": {0: 335}}, OffsetOutOfRangeError, "starting_offsets: 335 of queue 0 of colours is out"),
        ({"ending_offsets": {5: 1}}, NoSuchQueueError, "no queue 5"),
        ({"ending_offsets": [1]}, BadRequestError, "give a mapping of queue ids to offsets"),
        ({"columns": ["colour"]}, BadRequestError, "no column is called 'colour'; there are topic, queue_id"),
        ({"columns": "body"}, BadRequestError, "columns = 'body': give a list of names, or \"all\""),
        ({"columns": []}, BadRequestError, "columns names none"),
        ({"time": "stored"}, BadRequestError, "time is 'stored', neither 'store' nor 'born'"),
        ({"tags": "a", "filter": SqlFilter("n < 1")}, BadRequestError, "tags and filter are both given"),
        ({"fail_on_data_loss": "no"}, BadRequestError, "fail_on_data_loss = 'no' is neither True nor False"),
    ],
    ids=str,
)
def test_read_refuses_invalid_arguments(
    shared: Group, topic: str, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    arguments = {"topic": topic} | arguments
    with Client(shared.store) as client, StoreReader(shared.store) as reader:
        for read in (client.read, reader.read):
            with pytest.raises(error, match=r"\w") as raised:
                read(**arguments)
            assert text in str(raised.value)


def test_read_without_fail_on_data_loss_takes_the_offsets_that_exist(shared: Group, topic: str) -> None:
    with Client(shared.store) as client:
        stream = client.read(topic, starting_offsets={0: -5}, ending_offsets={0: 999}, fail_on_data_loss=False)
        assert (stream.starting_offsets[0], stream.ending_offsets[0]) == (0, 334)


def test_read_names_damage_or_skips_it(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with Client(group.store) as client:
        results = client.send_batch("orders", [b"%d" % number for number in range(10)], queue_id=0)
        client.read("orders")
    group.stop()
    log = next((group.store / "commitlog").iterdir())
    with log.open("r+b") as file:
        file.seek(int(results.physical_offsets[4]) + record.BODY_CRC)
        file.write(b"\xff\xff")
    with StoreReader(group.store) as reader:
        with pytest.raises(CorruptStoreError, match=r"queue 0 of orders: .*; fail_on_data_loss=False skips them"):
            reader.read("orders").to_arrow()
        found = reader.read("orders", fail_on_data_loss=False).to_arrow()["body"].to_pylist()
    assert found == [b"%d" % number for number in range(10) if number != 4]


def test_read_decompresses_bodies_unless_sys_flag_is_read() -> None:
    bodies = [b"plain", zlib.compress(b"packed" * 100)]
    flags = [0, record.SYS_FLAG_COMPRESSED]
    records = b"".join(
        encode_record(topic="t", body=body, sys_flag=flag, queue_offset=number, physical_offset=number * 10)
        for number, (body, flag) in enumerate(zip(bodies, flags, strict=True))
    )

    def read(names: tuple[str, ...], data: bytes) -> list[Any]:
        columns = message_columns(names)
        batches = sent_batches(names, *record_decode.locate(data, -1, columns.rows), "/store")
        return pa.Table.from_batches(batches)["body"].to_pylist()

    assert read(USER_COLUMNS, records) == [b"plain", b"packed" * 100]
    assert read(tuple(MESSAGE_COLUMNS), records) == read(("body", "sys_flag"), records) == bodies
    damaged = records.replace(bodies[1][:4], b"\0\0\0\0")
    with pytest.raises(BadMessageError, match=r"/store: log position 10: .* give bodies as they are stored"):
        read(("body",), damaged)


def test_texts_that_are_no_utf8_become_one_entry_of_a_dictionary() -> None:
    """Two different invalid tags are replaced by the same text."""
    tags = [b"\xff", b"\xfe", b"ok", b"", b"\xff"]
    records = b"".join(
        encode_record(topic="t", body=b"", properties="TAGS\x01####\x02", queue_offset=number).replace(b"####", tag)
        for number, tag in enumerate(tag.ljust(4, b"!") for tag in tags)
    )
    batch = record_batch(memoryview(records), len(tags), ("tag",))
    batch.validate(full=True)
    assert batch.column("tag").to_pylist() == ["\ufffd!!!", "\ufffd!!!", "ok!!", "!!!!", "\ufffd!!!"]
    assert len(batch.column("tag").dictionary) == 3


def test_many_distinct_tags_of_a_batch_make_a_dictionary() -> None:
    count = 5000
    records = b"".join(
        encode_record(topic=f"t{number % 3}", body=b"", properties=f"TAGS\x01tag-{number // 2 % 2000}\x02")
        for number in range(count)
    )
    batch = record_batch(memoryview(records), count, ("tag", "topic"))
    batch.validate(full=True)
    assert batch.column("tag").to_pylist() == [f"tag-{number // 2 % 2000}" for number in range(count)]
    assert batch.column("topic").dictionary.to_pylist() == ["t0", "t1", "t2"]


def test_read_without_its_packages_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"a": [1]})
    for package, convert in (("polars", as_polars), ("pandas", as_pandas)):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(
            ConfigurationError, match=rf"^{package} is not installed: pip install 'mqproc\[analysis\]'$"
        ):
            convert(table)
