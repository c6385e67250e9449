"""Parsing of read options; errors name the option, its value and the valid values."""

from __future__ import annotations

import dataclasses

import pytest
from pyspark.sql.types import ArrayType, BinaryType, MapType, StringType, StructField, StructType

from mqproc.errors import BadRequestError
from mqproc.spark.options import (
    EARLIEST,
    LATEST,
    MQPROC_COLUMNS,
    ROCKETMQ_COLUMNS,
    Offsets,
    ReadOptions,
    ReadSelection,
    read_options,
    schema_ddl,
)
from mqproc.spark.planning import split_bytes
from mqproc.spark.source import columns_of

EMPTY = ("subscribe", "topic", "subscribePattern", "queueId", "tag", "key", "columns")


def selection(**given: str) -> ReadSelection:
    return read_options({"path": "/store", **given}).selection


def test_defaults_read_everything() -> None:
    assert read_options({"path": "/store"}) == ReadOptions(("/store",))
    assert selection(startingOffsets="earliest", endingOffsets="latest", subExpression="*") == ReadSelection()


def test_names_are_case_insensitive_and_paths_parsed() -> None:
    given = read_options({"paths": '["/a", "/b"]', "batchrows": "7", "FAILONDATALOSS": "False"})
    assert (given.paths, given.batch_rows, given.fail_on_data_loss) == (("/a", "/b"), 7, False)


def test_topics_queues_offsets_and_words() -> None:
    assert selection(subscribe=" a, b,a ").topics == ("a", "b")
    assert selection(topic="a,b").topics == ("a,b",)
    assert selection(assign='{"a": [0, 2]}').queues == (("a", 0), ("a", 2))
    assert selection(startingOffsets='{"a": {"0": 5, "1": -2}}').starting == Offsets(
        EARLIEST, {("a", 0): 5, ("a", 1): EARLIEST}
    )
    assert selection(endingOffsets='{"a": {"0": -1}}').ending.of("a", 0) == LATEST
    assert selection(subExpression="x || y").tags == ("x", "y")
    assert selection(subExpression="").tags == ()


def test_values_with_commas_are_json() -> None:
    assert selection(key="a,b").keys == ("a", "b")
    assert selection(key='["a,b", "c"]').keys == ("a,b", "c")
    assert selection(subscribe='["a"]', queueId='["0", "2"]').named_queues() == [("a", 0), ("a", 2)]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"path": ""}, "no path is given"),
        ({"paths": '["/a", ""]'}, "no path is given"),
        ({"topics": "a"}, "option 'topics' is unknown; options are assign, batchBytes"),
        ({"owner": "me"}, "option 'owner' belongs to a table in Spark's catalog.* CREATE TEMPORARY VIEW name USING"),
        ({"subscribe": "a", "assign": '{"a": [0]}'}, "subscribe and assign exclude each other"),
        ({"subscribePattern": "("}, "subscribePattern = '\\('"),
        ({"assign": '{"a": ["x"]}'}, "it is like"),
        ({"startingOffsets": "end"}, "not valid JSON"),
        ({"startingOffsets": "latest"}, "leaves nothing to read"),
        ({"startingOffsets": '{"a": {"0": -1}}'}, "-1 is not an offset for queue '0' of 'a'"),
        ({"endingOffsets": '{"a": 7}'}, "it is like"),
        ({"startingOffsets": '{"a": [0, 1]}'}, "it is like"),
        ({"topic": "b", "startingOffsets": '{"a": {"0": 1}}'}, "startingOffsets: queue 0 of a is not among"),
        ({"assign": '{"a": [1]}', "endingOffsets": '{"a": {"0": 1}}'}, "endingOffsets: queue 0 of a is not among"),
        ({"startingOffsets": '{"a": {"²": 1}}'}, "1 is not an offset for queue '²' of 'a'"),
        ({"startingOffsets": '{"a": {"0": true}}'}, "True is not an offset"),
        ({"assign": '{"a": [true]}'}, "it is like"),
        ({"assign": '{"a": [2147483648]}'}, "it is like"),
        ({"startingOffsets": '{"a": {"2147483648": 0}}'}, "0 is not an offset for queue '2147483648' of 'a'"),
        ({"endingOffsets": '{"a": {"0": 9223372036854775808}}'}, "9223372036854775808 is not an offset"),
        ({"paths": "/a"}, "option paths = '/a' is not valid JSON"),
        ({"paths": "[1]"}, "it is like"),
        ({"key": '["a"'}, "option key = .* is not valid JSON"),
        ({"startingTimestamp": "yesterday"}, "startingTimestamp = 'yesterday' is not an integer"),
        ({"batchRows": "0"}, r"batchRows = 0 is not in \[1, 16,777,216\]"),
        ({"verifyCrc": "yes"}, "verifyCrc = 'yes' is neither true nor false"),
        ({"naming": "kafka"}, "naming = 'kafka'; it is one of mqproc, rocketmq"),
        ({"naming": "rocketmq", "columns": "queue_id"}, "unknown column 'queue_id'; columns are topic, flag"),
        ({"tag": "x", "subExpression": "y"}, "tag and subExpression exclude each other"),
        *(({name: ""}, f"option {name} = '' names nothing; leave it out for all") for name in EMPTY),
        ({"subscribe": ","}, "option subscribe = ',' names nothing"),
        ({"key": " "}, "option key = ' ' names nothing"),
        ({"tag": "[]"}, r"option tag = '\[\]' names nothing"),
        ({"subExpression": "||"}, r"option subExpression = '\|\|' names nothing"),
        ({"tag": "a,b\ud800"}, r"option tag = 'b\\ud800': character 1 is an unpaired surrogate"),
        ({"key": '["\\udc00"]'}, r"option key = '\\udc00': character 0 is an unpaired surrogate"),
        ({"assign": "{}"}, "option assign = '{}' names no queue"),
        ({"assign": '{"a": []}'}, "names no queue"),
        ({"assign": '{"a": [0]}', "queueId": "2"}, "option queueId = '2' leaves nothing to read of assign = "),
        ({"startingTimestamp": "7", "endingTimestamp": "7"}, "startingTimestamp = 7 leaves nothing to read below"),
        (
            {"startingOffsets": '{"a": {"0": 9}}', "endingOffsets": '{"a": {"0": 8}}'},
            "startingOffsets = .*: 9 of queue 0 of a is after its endingOffsets 8",
        ),
    ],
)
def test_invalid_option_error_names_option(given: dict[str, str], says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        read_options({"path": "/store"} | given)


def test_schemas() -> None:
    assert schema_ddl("mqproc").startswith("store string, topic string, queue_id int, queue_offset bigint")
    assert schema_ddl("mqproc", ["body", "keys"]) == "body binary, keys array<string>"
    assert schema_ddl("rocketmq", ["bornTimestamp"]) == "bornTimestamp timestamp_ltz"
    assert len(schema_ddl("rocketmq").split(", ")) == len(ROCKETMQ_COLUMNS) == 9
    assert "map<string,string>" in MQPROC_COLUMNS.values()


TOPIC = StructField("topic", StringType())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ([], "the schema has no columns; columns are store, topic, "),
        ([TOPIC, StructField("body", BinaryType()), TOPIC], "the schema has column 'topic' 2 times"),
        ([StructField("topic", StringType(), nullable=False)], "column topic of the schema is NOT NULL"),
        ([StructField("keys", ArrayType(StringType(), False))], "column keys of the schema is NOT NULL"),
        ([StructField("properties", MapType(StringType(), StringType(), False))], "column properties of the schema is"),
    ],
)
def test_invalid_schemas_raise(fields: list[StructField], says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        columns_of(StructType(fields), "mqproc")


def test_schema_selects_columns() -> None:
    assert columns_of(StructType([TOPIC, StructField("keys", ArrayType(StringType()))]), "mqproc") == ["topic", "keys"]


def test_batch_size_default_is_1_mib() -> None:
    """Batches of 16 MiB took 10 % more of Java's time and delayed the following batch."""
    assert read_options({"path": "/store"}).batch_bytes == 1 << 20
    assert read_options({"path": "/store", "batchBytes": str(16 << 20)}).batch_bytes == 16 << 20


@pytest.mark.parametrize(("columns", "mib"), [("", 256), ("topic,body", 256), ("topic,store_timestamp", 512)])
def test_split_size_is_larger_without_bodies(columns: str, mib: int) -> None:
    options = read_options({"path": "/s", "columns": columns} if columns else {"path": "/s"})
    assert split_bytes(4096 << 20, options) == mib << 20
    assert split_bytes(48 << 30, options) == max(768, mib) << 20
    assert split_bytes(4096 << 20, dataclasses.replace(options, min_partitions=32)) == 128 << 20
