"""Messages of stores as a DataFrame, read by `mapInArrow` over planned partitions.

    load() ──plan──▶ one row per partition ──mapInArrow──▶ Arrow batches ──▶ rows

Spark converts the batches of a Python source to rows twice: after the source, and in the `Project` above the scan. It
converts the batches of `mapInArrow` once. So a source here returns only the planned partitions, and a map reads them,
as `format("mqproc")` would. Ranges of numbers would not do as the source: Spark would estimate the messages at a few
bytes and broadcast them in a join. Jobs that write files themselves (`jobs/output.py`) use the batches without
rows.
"""

from __future__ import annotations

import datetime
import json
import numbers
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from mqproc.errors import BadRequestError
from mqproc.spark.options import PathArgument, ReadOptions, column_types, ddl_type, path_texts, read_options
from mqproc.spark.session import register
from mqproc.spark.source import BatchReader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


BatchFunction = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]
Timestamp = int | datetime.datetime
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
# Arguments of `messages` and the options of the source that they set.
_WORDS: Final = {"topic": "subscribe", "queue_id": "queueId", "tag": "tag", "key": "key", "columns": "columns"}
_TIMES: Final = {"begin": "startingTimestamp", "end": "endingTimestamp"}
_OFFSETS: Final = {"starting_offsets": "startingOffsets", "ending_offsets": "endingOffsets"}
_ARGUMENTS: Final = frozenset({*_WORDS, *_TIMES, *_OFFSETS, "fail_on_data_loss"})
# Options of the source, in lower case, that jobs apply themselves.
_JOB_OPTIONS: Final = frozenset({"failondataloss", "verifycrc", "plainbodies"})


class PartitionSource(DataSource):
    """The planned partitions of a batch read, one per row; options are the source's."""

    @classmethod
    def name(cls) -> str:
        return "mqproc_partitions"

    def schema(self) -> str:
        return "partition binary"

    def reader(self, schema: StructType) -> DataSourceReader:
        return PartitionReader(read_options(self.options), [])


class PartitionReader(BatchReader):
    """Returns each planned partition as a row instead of reading it."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({"partition": [pickle.dumps(partition)]})


@dataclass(frozen=True, slots=True)
class BatchRead:
    """A frame with one row per task, and the function that makes batches from its rows.

    `types` are the columns of the batches, with Spark's short type names.
    """

    frame: DataFrame
    read: BatchFunction
    types: Mapping[str, str]

    def rows(self) -> DataFrame:
        """One row per message."""
        columns = [f"{name} {ddl_type(kind)}" for name, kind in self.types.items()]
        return self.frame.mapInArrow(self.read, ", ".join(columns))

    def arrow_schema(self) -> pa.Schema:
        """The schema of each batch."""
        import pyarrow as pa

        from mqproc.spark.batches import ARROW

        return pa.schema([(name, ARROW[kind]) for name, kind in self.types.items()])


def messages(
    spark: SparkSession,
    path: PathArgument,
    *,
    topic: str | Sequence[str] = (),
    queue_id: int | Sequence[int] = (),
    begin: Timestamp | None = None,
    end: Timestamp | None = None,
    tag: str | Sequence[str] = (),
    key: str | Sequence[str] = (),
    columns: Sequence[str] = (),
    starting_offsets: Mapping[str, Mapping[int, int]] | None = None,
    ending_offsets: Mapping[str, Mapping[int, int]] | None = None,
    naming: str = "mqproc",
    fail_on_data_loss: bool = True,
    **options: str | int | bool,
) -> DataFrame:
    """Messages of the stores at `path`: a folder, a pattern, a URL, or several of them.

    begin ≤ store time < end, in Unix ms or as a datetime with a time zone; one of the tags and one of the keys must
    match; only `columns` are read. An empty tuple means all, an empty list is an error. A string may hold several words
    separated by commas; words of a list are taken literally. `options` are further options of the source, by its names.
    Raises BadRequestError for an unknown option or column and for an invalid value.

    The rows are the same as from `spark.read.format("mqproc")`, at less cost (see the module).

        messages(spark, "/var/lib/store", topic="orders", columns=["queue_offset", "body"]).count()
    """
    selection: dict[str, Any] = {
        "topic": topic,
        "queue_id": queue_id,
        "begin": begin,
        "end": end,
        "tag": tag,
        "key": key,
    }
    selection |= {"columns": columns, "starting_offsets": starting_offsets, "ending_offsets": ending_offsets}
    selection |= {"naming": naming, "fail_on_data_loss": fail_on_data_loss, **options}
    texts = _option_texts(selection)
    register(spark)
    if _parse_options(path, texts).filter_pushdown:
        # Spark pushes filters into a source only, not into a map after it.
        return spark.read.format("mqproc").options(**texts).load(path_texts(path))
    return plan_messages(spark, path, **selection).rows()


def plan_messages(spark: SparkSession, path: PathArgument, **selection: Any) -> BatchRead:
    """The read behind `messages`, whose first query plans its partitions; as `messages`."""
    texts = _option_texts(selection)
    options = _parse_options(path, texts)
    types = column_types(options.naming)
    names = list(options.columns or types)
    reader = BatchReader(options, names)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for partition in batch.column("partition").to_pylist():
                yield from reader.read(pickle.loads(partition))

    spark.dataSource.register(PartitionSource)
    frame = spark.read.format(PartitionSource.name()).options(**texts).load(path_texts(path))
    return BatchRead(frame, read, {name: types[name] for name in names})


def _parse_options(path: PathArgument, texts: Mapping[str, str]) -> ReadOptions:
    return read_options({**texts, "paths": json.dumps(path_texts(path))})


def _option_texts(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Translate the arguments of `messages` to options. Missing arguments have their defaults."""
    texts = {"failOnDataLoss": arguments.get("fail_on_data_loss", True)}
    texts |= {name: value for name, value in arguments.items() if name not in _ARGUMENTS}
    for argument, option in _WORDS.items():
        words = _words(argument, arguments.get(argument, ()))
        if words is not None and (argument != "columns" or words != "[]"):
            texts[option] = words
    for argument, option in _TIMES.items():
        if (time := arguments.get(argument)) is not None:
            texts[option] = _ms(argument, time)
    for argument, option in _OFFSETS.items():
        if (offsets := arguments.get(argument)) is not None:
            texts[option] = _offsets(argument, offsets)
    return _text(texts)


def keys_of(key: str | Sequence[str]) -> tuple[str, ...]:
    """The keys that the argument `key` of `messages` selects; () for all."""
    words = _words("key", key)
    return () if words is None else read_options({"path": ".", "key": words}).selection.keys


def flags_of(selection: Mapping[str, Any]) -> ReadOptions:
    """The options for damage, CRCs and compressed bodies among arguments of `messages`.

    Only `fail_on_data_loss`, `verify_crc` and `plain_bodies` of the result are set. Raises BadRequestError for an
    invalid value.
    """
    texts = {name: value for name, value in selection.items() if name.lower() in _JOB_OPTIONS}
    return read_options({"path": "."} | _text({"failOnDataLoss": selection.get("fail_on_data_loss", True)} | texts))


def _text(texts: Mapping[str, Any]) -> dict[str, str]:
    """Option values as Spark's strings."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in texts.items()}


def _words(name: str, words: object) -> str | None:
    """One word or several as the text of an option; None for an empty tuple."""
    if isinstance(words, str):
        return words
    if isinstance(_plain(words), int):
        return str(words).lower()
    if not isinstance(words, Iterable):
        raise BadRequestError(f"{name} = {words!r} is neither a word nor several")
    if isinstance(words, tuple) and not words:
        return None
    # A JSON list, since words may contain commas.
    return json.dumps([str(word) for word in words])


def _offsets(name: str, offsets: Mapping[str, Mapping[int, int]]) -> str:
    try:
        plain = {
            topic: {str(queue): _plain(offset) for queue, offset in queues.items()} for topic, queues in offsets.items()
        }
        return json.dumps(plain)
    except (AttributeError, TypeError):
        raise BadRequestError(f"{name} = {offsets!r}; it is like {{'orders': {{0: 23}}}}") from None


def _plain(value: object) -> object:
    """Convert integers of other types, such as numpy's, to int."""
    return value if isinstance(value, bool) or not isinstance(value, numbers.Integral) else int(value)


def _ms(name: str, time: Timestamp) -> int:
    """The first millisecond at or after a time: stores keep milliseconds."""
    if isinstance(time, datetime.datetime) and time.tzinfo is not None:
        return -((_EPOCH - time) // datetime.timedelta(milliseconds=1))
    ms = _plain(time)
    if type(ms) is not int:
        raise BadRequestError(f"{name} = {time!r} is neither Unix ms as an int nor a datetime with a time zone")
    return ms
