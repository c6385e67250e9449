"""Options of source and sink, and the columns of messages.

Options have the names of Spark's Kafka source where the meaning is the same. An unknown option is an error: a misspelt
filter would return every row. Spark imports this module to discover the source, so it imports neither numpy nor
pyarrow.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqproc.arrow.columns import MESSAGE_COLUMNS
from mqproc.errors import BadRequestError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

# Columns

# Columns of mqproc's naming in their default order, with Spark's short type names; Spark has no dictionaries.
MQPROC_COLUMNS: Final[dict[str, str]] = {"store": "string"} | {
    name: "string" if kind == "dictionary" else kind for name, kind in MESSAGE_COLUMNS.items()
}
# Columns of RocketMQ's Spark connector: the mqproc column of each, and its type.
ROCKETMQ_COLUMNS: Final[dict[str, tuple[str, str]]] = {
    "topic": ("topic", "string"),
    "flag": ("flag", "int"),
    "body": ("body", "binary"),
    "properties": ("properties_json", "string"),
    "brokerName": ("store_name", "string"),
    "queueId": ("queue_id", "int"),
    "queueOffset": ("queue_offset", "bigint"),
    "bornTimestamp": ("born_timestamp", "timestamp"),
    "storeTimestamp": ("store_timestamp", "timestamp"),
}
COLUMN_NAMINGS: Final = ("mqproc", "rocketmq")
# DDL type names that do not depend on the session's spark.sql.timestampType.
_DDL_TYPES: Final = {"timestamp": "timestamp_ltz"}


def column_types(naming: str) -> dict[str, str]:
    """All columns of a naming in order, with Spark's short type names."""
    if naming == "mqproc":
        return MQPROC_COLUMNS
    return {name: kind for name, (_source, kind) in ROCKETMQ_COLUMNS.items()}


def column_source(naming: str, name: str) -> str:
    """The mqproc column, or `properties_json` or `store_name`, that a column is built from."""
    return name if naming == "mqproc" else ROCKETMQ_COLUMNS[name][0]


def schema_ddl(naming: str, names: Sequence[str] = ()) -> str:
    """The DDL of the named columns (empty: all). Raises BadRequestError for an unknown column."""
    check_column_names(naming, names)
    types = column_types(naming)
    return ", ".join(f"{name} {ddl_type(types[name])}" for name in names or types)


def ddl_type(kind: str) -> str:
    """The DDL name of a type given by Spark's short name."""
    return _DDL_TYPES.get(kind, kind)


def check_column_names(naming: str, names: Iterable[str]) -> None:
    """Raise BadRequestError for an unknown column."""
    types = column_types(naming)
    for name in names:
        if name not in types:
            raise BadRequestError(f"unknown column {name!r}; columns are {', '.join(types)}")


# Options of reads and streams


TIME_MIN: Final = -(1 << 62)
TIME_MAX: Final = 1 << 62
OFFSET_MAX: Final = 1 << 62
QUEUE_ID_MAX: Final = (1 << 31) - 1
EARLIEST: Final = -2
LATEST: Final = -1
_FILE: Final = re.compile(r"\Afile:(?://(?:localhost(?=/))?|(?=/))", re.IGNORECASE)

Queue = tuple[str, int]
PathArgument = str | Path | Sequence[str | Path]
"""Stores as functions take them: folders, patterns or URLs."""


@dataclass(frozen=True, slots=True)
class Offsets:
    """Queue offsets by queue, and a default; EARLIEST and LATEST are allowed in both."""

    default: int
    by_queue: Mapping[Queue, int] = dataclasses.field(default_factory=dict)

    def of(self, topic: str, queue_id: int) -> int:
        return self.by_queue.get((topic, queue_id), self.default)


@dataclass(frozen=True, slots=True)
class ReadSelection:
    """Which messages to read: begin_ms ≤ store time < end_ms, one of `tags` and `keys`.

    Empty means all.
    """

    topics: tuple[str, ...] = ()
    topic_pattern: str = ""
    queues: tuple[Queue, ...] = ()
    queue_ids: tuple[int, ...] = ()
    begin_ms: int = TIME_MIN
    end_ms: int = TIME_MAX
    tags: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    starting: Offsets = Offsets(EARLIEST)
    ending: Offsets = Offsets(LATEST)

    def includes(self, topic: str, queue_id: int) -> bool:
        """Whether the selection includes a queue."""
        if self.queues and (topic, queue_id) not in self.queues:
            return False
        return self.includes_topic(topic) and (not self.queue_ids or queue_id in self.queue_ids)

    def includes_topic(self, topic: str) -> bool:
        """Whether the selection may include queues of a topic."""
        if self.topics and topic not in self.topics:
            return False
        return not self.topic_pattern or re.fullmatch(self.topic_pattern, topic) is not None

    @property
    def is_narrow(self) -> bool:
        """Whether the selection excludes some queues."""
        return bool(self.topics or self.topic_pattern or self.queues or self.queue_ids)

    def named_queues(self) -> list[Queue] | None:
        """All queues that the selection can include; None when that depends on the stores."""
        if self.queues:
            return [queue for queue in self.queues if self.includes(*queue)]
        if self.topics and self.queue_ids:
            return [(topic, queue_id) for topic in self.topics for queue_id in self.queue_ids]
        return None


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a batch read."""

    paths: tuple[str, ...]
    selection: ReadSelection = ReadSelection()
    naming: str = "mqproc"
    columns: tuple[str, ...] = ()
    min_partitions: int = 1
    split_bytes: int = 0
    """Bytes of log per partition; 0: chosen by the size of the stores."""
    batch_rows: int = 32_768
    batch_bytes: int = 1 << 20
    """Bytes of records per batch when bodies are read; the default fits a processor's cache."""
    fail_on_data_loss: bool = True
    verify_crc: bool | None = None
    """CRCs to verify: of all records in the range, of none, or (None) of selected records when bodies are read."""
    clock_step_ms: int = 60_000
    """Largest step back of a store's clock; widens the part of the log that is read for a time range."""
    filter_pushdown: bool = False
    plain_bodies: bool = True
    """Decompress bodies that producers have compressed."""
    by_units: bool | None = None
    """Read queues by their ConsumeQueue units, or scan the log; None: whichever is less work."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of a stream: the options of a read, the start position and the rate."""

    read: ReadOptions
    starting: Offsets
    starting_ms: int | None = None
    """Store time at which a new query starts; None: `starting` decides."""
    offsets_per_trigger_max: int = 0
    """Messages per micro-batch; 0: no limit."""
    records_per_partition_max: int = 0
    """Messages per task; 0: chosen by the size of the micro-batch."""
    consumer_group: str = ""
    """Consumer group whose committed offsets follow the query; "" for none."""


def path_texts(path: PathArgument) -> list[str]:
    return [str(path)] if isinstance(path, str | Path) else [str(each) for each in path]


def without_scheme(path: str) -> str:
    """The folder's path, without a `file:` scheme in any case and with or without a local host."""
    return _FILE.sub("", path, count=1)


def table_options(raw: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """(naming, columns) of a read or a stream. Raises BadRequestError."""
    values = _canonical(raw, _BOTH + _BATCH_ONLY + _STREAM_ONLY)
    naming = values.get("naming", COLUMN_NAMINGS[0])
    if naming not in COLUMN_NAMINGS:
        raise BadRequestError(f"option naming = {naming!r}; it is one of {', '.join(COLUMN_NAMINGS)}")
    columns = _words(values, "columns")
    check_column_names(naming, columns)
    return naming, columns


def read_options(raw: Mapping[str, str]) -> ReadOptions:
    """Parse the options of a batch read. Raises BadRequestError."""
    values = _canonical(raw, _BOTH + _BATCH_ONLY, _STREAM_ONLY, "is for streams")
    selection = dataclasses.replace(
        _selection(values),
        **_integers(values, _TIMES),
        starting=_offsets(values, "startingOffsets", EARLIEST),
        ending=_offsets(values, "endingOffsets", LATEST),
    )
    _check_offsets(selection, startingOffsets=selection.starting, endingOffsets=selection.ending)
    _check_ranges(values, selection)
    return _read(raw, values, selection)


def stream_options(raw: Mapping[str, str]) -> StreamOptions:
    """Parse the options of a stream. Raises BadRequestError."""
    values = _canonical(raw, _BOTH + _STREAM_ONLY, _BATCH_ONLY, "is for batch reads")
    if "startingTimestamp" in values and "startingOffsets" in values:
        raise BadRequestError("options startingOffsets and startingTimestamp exclude one another in a stream")
    numbers = _integers(values, _STREAM_INTEGERS)
    selection, starting = _selection(values), _starting(values)
    _check_offsets(selection, startingOffsets=starting)
    read = _read(raw, values, selection)
    return StreamOptions(read, starting, consumer_group=values.get("consumerGroup", ""), **numbers)


def _check_offsets(selection: ReadSelection, **by_option: Offsets) -> None:
    """Raise BadRequestError when offsets name a queue that the selection excludes."""
    for name, offsets in by_option.items():
        for topic, queue_id in offsets.by_queue:
            if not selection.includes(topic, queue_id):
                raise BadRequestError(f"option {name}: queue {queue_id} of {topic} is not among the selected queues")


def _check_ranges(values: Mapping[str, str], selection: ReadSelection) -> None:
    """Raise BadRequestError when the time range or a queue's offset range is empty."""
    begin_ms, end_ms = selection.begin_ms, selection.end_ms
    if begin_ms >= end_ms:
        raise BadRequestError(
            f"option startingTimestamp = {begin_ms:,} leaves nothing to read below endingTimestamp = {end_ms:,}"
        )
    for (topic, queue_id), start in selection.starting.by_queue.items():
        if 0 <= (end := selection.ending.of(topic, queue_id)) < start:
            raise BadRequestError(
                f"option startingOffsets = {values['startingOffsets']!r}: {start:,} of queue {queue_id} of {topic} "
                f"is after its endingOffsets {end:,}"
            )


def _selection(values: Mapping[str, str]) -> ReadSelection:
    found = ReadSelection(
        topics=_topics(values),
        topic_pattern=_pattern(values),
        queues=_assigned_queues(values),
        queue_ids=tuple(_integer("queueId", word, 0, QUEUE_ID_MAX) for word in _words(values, "queueId")),
        tags=_tags(values),
        keys=_words(values, "key"),
    )
    if found.queues and not found.named_queues():
        queue_ids, assigned = values["queueId"], values["assign"]
        raise BadRequestError(f"option queueId = {queue_ids!r} leaves nothing to read of assign = {assigned!r}")
    return found


# Integer options by field, with their limits; boolean options by field. Missing options leave the field's default.
_TIMES: Final = {
    "begin_ms": ("startingTimestamp", TIME_MIN, TIME_MAX),
    "end_ms": ("endingTimestamp", TIME_MIN, TIME_MAX),
}
_READ_INTEGERS: Final = {
    "min_partitions": ("minPartitions", 1, 1_000_000),
    "batch_rows": ("batchRows", 1, 1 << 24),
    "batch_bytes": ("batchBytes", 1, 1 << 30),
    "split_bytes": ("splitBytes", 0, 1 << 50),
    "clock_step_ms": ("clockStepMs", 0, 1 << 40),
}
_STREAM_INTEGERS: Final = {
    "starting_ms": ("startingTimestamp", TIME_MIN, TIME_MAX),
    "offsets_per_trigger_max": ("maxOffsetsPerTrigger", 1, 1 << 40),
    "records_per_partition_max": ("maxRecordsPerPartition", 1, 1 << 40),
}
_WRITE_INTEGERS: Final = {"queue_id": ("queueId", 0, QUEUE_ID_MAX), "queues": ("queues", 1, 1 << 16)}
_READ_BOOLEANS: Final = {
    "fail_on_data_loss": "failOnDataLoss",
    "verify_crc": "verifyCrc",
    "plain_bodies": "plainBodies",
    "filter_pushdown": "filterPushdown",
    "by_units": "byUnits",
}


def _read(raw: Mapping[str, str], values: Mapping[str, str], selection: ReadSelection) -> ReadOptions:
    naming, columns = table_options(raw)
    fields = {
        **_integers(values, _READ_INTEGERS),
        **{field: _boolean(values, option) for field, option in _READ_BOOLEANS.items() if option in values},
    }
    return ReadOptions(paths=_paths(values), selection=selection, naming=naming, columns=columns, **fields)


_SUBSCRIPTIONS: Final = ("subscribe", "topic", "subscribePattern", "assign")
_BOTH: Final = (
    *("path", "paths"),
    *_SUBSCRIPTIONS,
    *("queueId", "startingOffsets", "startingTimestamp", "tag", "subExpression", "key", "columns", "naming"),
    *("minPartitions", "batchRows", "batchBytes", "failOnDataLoss", "verifyCrc", "plainBodies"),
)
_BATCH_ONLY: Final = ("endingOffsets", "endingTimestamp", "splitBytes", "clockStepMs", "filterPushdown", "byUnits")
_STREAM_ONLY: Final = ("maxOffsetsPerTrigger", "maxRecordsPerPartition", "consumerGroup")
# Options that Spark's catalog adds for a table.
_TABLE_OPTIONS: Final = frozenset({"owner", "location", "provider", "comment", "external", "is_managed_location"})


def _canonical(
    raw: Mapping[str, str], known: tuple[str, ...], others: tuple[str, ...] = (), other_use: str = ""
) -> dict[str, str]:
    """The options under their canonical names, whose case Spark does not keep.

    Raises BadRequestError for an unknown option, with `other_use` for one of `others`.
    """
    names, other_names = ({name.lower(): name for name in some} for some in (known, others))
    found: dict[str, str] = {}
    for name, value in raw.items():
        if name.lower() in other_names:
            raise BadRequestError(f"option {other_names[name.lower()]!r} {other_use}")
        if name.lower() in _TABLE_OPTIONS and known is not _SINK_OPTIONS:
            raise BadRequestError(
                f"option {name!r} belongs to a table in Spark's catalog, and a store cannot be one: use CREATE "
                "TEMPORARY VIEW name USING mqproc OPTIONS (path '…')"
            )
        if name.lower() not in names:
            shown = sorted(set(known) - {_CHECKPOINT})
            raise BadRequestError(f"option {name!r} is unknown; options are {', '.join(shown)}")
        found[names[name.lower()]] = str(value)
    return found


def _paths(values: Mapping[str, str]) -> tuple[str, ...]:
    several = _texts(values, "paths") if "paths" in values else []
    paths = (*([values["path"]] if values.get("path") else []), *several)
    # An empty path would mean the folder that Spark was started in.
    if not paths or "" in paths:
        raise BadRequestError("no path is given: load(path) takes a store's folder, a pattern, or a list of them")
    return paths


def _topics(values: Mapping[str, str]) -> tuple[str, ...]:
    chosen = [name for name in _SUBSCRIPTIONS if name in values]
    if len(chosen) > 1:
        raise BadRequestError(f"options {' and '.join(chosen)} exclude each other")
    return _nonempty(values, "topic", [values["topic"]]) if "topic" in values else _words(values, "subscribe")


def _pattern(values: Mapping[str, str]) -> str:
    if "subscribePattern" not in values:
        return ""
    (pattern,) = _nonempty(values, "subscribePattern", [values["subscribePattern"]])
    try:
        re.compile(pattern)
    except re.error as error:
        raise BadRequestError(f"option subscribePattern = {pattern!r}: {error}") from None
    return pattern


def _words(values: Mapping[str, str], name: str) -> tuple[str, ...]:
    """The words of an option, separated by commas or as JSON; () when it is missing."""
    if name not in values:
        return ()
    text = values[name]
    words = _texts(values, name) if text.startswith("[") else [word.strip() for word in text.split(",")]
    return _nonempty(values, name, words)


def _nonempty(values: Mapping[str, str], name: str, words: Iterable[str]) -> tuple[str, ...]:
    """The non-empty words, each once. Raises BadRequestError when none is left."""
    found = tuple(dict.fromkeys(word for word in words if word))
    if not found:
        raise BadRequestError(f"option {name} = {values[name]!r} names nothing; leave it out for all")
    for word in found:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise BadRequestError(
                f"option {name} = {word!r}: character {error.start} is an unpaired surrogate"
            ) from None
    return found


def _tags(values: Mapping[str, str]) -> tuple[str, ...]:
    """Tags from `tag` as words, or from `subExpression` as `a || b`; `*` means all."""
    expression = values.get("subExpression", "*")
    if expression.strip() in ("*", ""):
        return _words(values, "tag")
    if "tag" in values:
        raise BadRequestError("options tag and subExpression exclude each other")
    return _nonempty(values, "subExpression", (tag.strip() for tag in expression.split("||")))


def _integers(values: Mapping[str, str], table: Mapping[str, tuple[str, int, int]]) -> dict[str, Any]:
    """Integer options that are set, by field."""
    return {
        field: _integer(option, values[option], low, high)
        for field, (option, low, high) in table.items()
        if option in values
    }


def _integer(name: str, text: str, low: int, high: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise BadRequestError(f"option {name} = {text!r} is not an integer") from None
    if not low <= number <= high:
        raise BadRequestError(f"option {name} = {number:,} is not in [{low:,}, {high:,}]")
    return number


def _boolean(values: Mapping[str, str], name: str) -> bool:
    text = values[name].lower()
    if text not in ("true", "false"):
        raise BadRequestError(f"option {name} = {values[name]!r} is neither true nor false")
    return text == "true"


def _assigned_queues(values: Mapping[str, str]) -> tuple[Queue, ...]:
    if "assign" not in values:
        return ()
    by_topic = _json(values, "assign", list, '{"orders": [0, 1]}')
    found = [(topic, queue) for topic, queues in by_topic.items() for queue in queues]
    if not all(type(queue_id) is int and 0 <= queue_id <= QUEUE_ID_MAX for _topic, queue_id in found):
        raise BadRequestError(f'option assign = {values["assign"]!r}; it is like {{"orders": [0, 1]}}')
    if not all(by_topic.values()) or not found:
        raise BadRequestError(f"option assign = {values['assign']!r} names no queue; leave it out for all")
    return tuple(found)


_OFFSET_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}


def _offsets(values: Mapping[str, str], name: str, default: int) -> Offsets:
    text = values.get(name, "").lower()
    # A read that starts at the end, or ends at the start, returns no rows from any store: a mistake.
    if text in _OFFSET_WORDS and _OFFSET_WORDS[text] != default:
        raise BadRequestError(f"option {name} = {text!r} leaves nothing to read")
    if not text or text in _OFFSET_WORDS:
        return Offsets(default)
    return Offsets(default, _by_queue(values, name, (default,)))


def _starting(values: Mapping[str, str]) -> Offsets:
    """Where a stream starts; queues missing from the JSON start at their first message."""
    text = values.get("startingOffsets", "latest").lower()
    if text in _OFFSET_WORDS:
        return Offsets(_OFFSET_WORDS[text])
    return Offsets(EARLIEST, _by_queue(values, "startingOffsets", (EARLIEST, LATEST)))


def _by_queue(values: Mapping[str, str], name: str, words: tuple[int, ...]) -> dict[Queue, int]:
    found: dict[Queue, int] = {}
    for topic, queues in _json(values, name, dict, '{"orders": {"0": 23}}').items():
        for queue, offset in queues.items():
            is_queue = queue.isascii() and queue.isdecimal() and int(queue) <= QUEUE_ID_MAX
            if not is_queue or type(offset) is not int or not (0 <= offset <= OFFSET_MAX or offset in words):
                raise BadRequestError(f"option {name}: {offset!r} is not an offset for queue {queue!r} of {topic!r}")
            found[topic, int(queue)] = offset
    return found


def _json(values: Mapping[str, str], name: str, kind: type[list[Any] | dict[str, Any]], like: str) -> dict[str, Any]:
    """An option's JSON object with values of a `kind`; `like` is an example."""
    found = _load_json(values, name)
    if not isinstance(found, dict) or not all(isinstance(part, kind) for part in found.values()):
        raise BadRequestError(f"option {name} = {values[name]!r}; it is like {like}")
    return found


def _texts(values: Mapping[str, str], name: str) -> list[str]:
    """An option's JSON list of strings."""
    found = _load_json(values, name)
    if not isinstance(found, list) or not all(isinstance(part, str) for part in found):
        raise BadRequestError(f'option {name} = {values[name]!r}; it is like ["one", "two"]')
    return found


def _load_json(values: Mapping[str, str], name: str) -> Any:
    try:
        return json.loads(values[name])
    except json.JSONDecodeError as error:
        raise BadRequestError(f"option {name} = {values[name]!r} is not valid JSON: {error}") from None


# Options and columns of the sink

DEFAULT_QUEUES: Final = 8
"""Queues of a topic that a write creates."""

SINK_COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "topic": ("string",),
    "body": ("binary", "string"),
    "tag": ("string",),
    "keys": ("array<string>", "string"),
    "queue_id": ("int",),
    "properties": ("map<string,string>",),
    "flag": ("int",),
    "born_timestamp": ("timestamp",),
}
"""Columns that a write accepts, with their types: all that a sender may set."""

_CHECKPOINT: Final = "checkpointLocation"
_SINK_OPTIONS: Final = ("path", "topic", "queues", "queueId", "writeId", _CHECKPOINT)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of a write. `store` is the folder of a group that runs on the executors' machine."""

    store: str
    topic: str = ""
    """Topic of all rows; "": the column `topic` of each row."""
    queue_id: int | None = None
    """Queue of all rows; None: the column `queue_id`, or one queue for the rows of a partition."""
    queues: int = DEFAULT_QUEUES
    write_id: str = ""
    """Name of a batch write, under which repeating it stores no row twice; "": a new name for each write."""


def write_options(raw: Mapping[str, str], *, overwrite: bool) -> WriteOptions:
    """Parse the options of a write. Raises BadRequestError."""
    values = _canonical(raw, _SINK_OPTIONS)
    if overwrite:
        raise BadRequestError("messages are appended and cannot be overwritten; use mode('append')")
    store = without_scheme(values.get("path", ""))
    if not store or "://" in store:
        raise BadRequestError(f"path = {store!r}: must be the folder of one store")
    numbers = _integers(values, _WRITE_INTEGERS)
    return WriteOptions(store, values.get("topic", ""), write_id=values.get("writeId", ""), **numbers)


def check_columns(options: WriteOptions, schema: StructType) -> None:
    """Raise BadRequestError for a column that cannot be written, and for a missing one."""
    names = schema.fieldNames()
    for field in schema.fields:
        if field.name not in SINK_COLUMNS:
            raise BadRequestError(f"column {field.name} cannot be written; select from {', '.join(SINK_COLUMNS)}")
        actual = field.dataType.simpleString()
        if actual not in SINK_COLUMNS[field.name]:
            allowed = " or ".join(map(ddl_type, SINK_COLUMNS[field.name]))
            raise BadRequestError(f"column {field.name} is {actual}; it must be {allowed}")
    if "body" not in names:
        raise BadRequestError("column body is missing")
    if "topic" not in names and not options.topic:
        raise BadRequestError("column topic is missing; the option topic sets one topic for all rows")
