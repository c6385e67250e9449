"""The source's options, read from what the user gave to Spark. Names are the Kafka source's where the meaning is.

Every option that is given is looked at, and one that is not known is refused: a misspelt filter would otherwise give
every row. Light, as `columns` is.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from mqproc.errors import BadRequestError
from mqproc.spark.columns import NAMINGS, check

TIME_MIN: Final = -(1 << 62)
TIME_MAX: Final = 1 << 62
OFFSET_MAX: Final = 1 << 62
QUEUE_ID_MAX: Final = (1 << 31) - 1
EARLIEST: Final = -2
LATEST: Final = -1
_FILE: Final = re.compile(r"\Afile:(?://(?:localhost(?=/))?|(?=/))", re.IGNORECASE)

Queue = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Offsets:
    """Queue offsets by queue; `default` for the others: EARLIEST or LATEST, which may stand in `by_queue` too."""

    default: int
    by_queue: Mapping[Queue, int] = dataclasses.field(default_factory=dict)

    def of(self, topic: str, queue_id: int) -> int:
        return self.by_queue.get((topic, queue_id), self.default)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which messages: empty means all. begin_ms ≤ store time < end_ms; a message has one of `tags`, one of `keys`."""

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

    def takes(self, topic: str, queue_id: int) -> bool:
        """Whether messages of a queue are wanted."""
        if self.queues and (topic, queue_id) not in self.queues:
            return False
        return self.takes_topic(topic) and (not self.queue_ids or queue_id in self.queue_ids)

    def takes_topic(self, topic: str) -> bool:
        """Whether messages of a topic may be wanted."""
        if self.topics and topic not in self.topics:
            return False
        return not self.topic_pattern or re.fullmatch(self.topic_pattern, topic) is not None

    @property
    def is_narrow(self) -> bool:
        """Whether some queues are left out."""
        return bool(self.topics or self.topic_pattern or self.queues or self.queue_ids)

    def named_queues(self) -> list[Queue] | None:
        """All queues that can be meant; None when only the stores can tell."""
        if self.queues:
            return [queue for queue in self.queues if self.takes(*queue)]
        if self.topics and self.queue_ids:
            return [(topic, queue_id) for topic in self.topics for queue_id in self.queue_ids]
        return None


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a read was asked for."""

    paths: tuple[str, ...]
    selection: Selection = Selection()
    naming: str = "mqproc"
    columns: tuple[str, ...] = ()
    min_partitions: int = 1
    split_bytes: int = 0
    """Bytes of log a partition has; 0: chosen by the size of the stores."""
    batch_rows: int = 32_768
    batch_bytes: int = 1 << 20
    """Of records, where bodies are read: few enough to stay in a processor's cache on their way to a row."""
    fail_on_data_loss: bool = True
    verify_crc: bool | None = None
    """Of all records that are passed, or of none; None: of the wanted ones where the body is among the columns."""
    clock_step_ms: int = 60_000
    """How far a store's clock may have been set back; decides how much of the log a time range leaves unread."""
    filter_pushdown: bool = False
    plain_bodies: bool = False
    """Bodies as they were before their producers compressed them, instead of as they are stored."""
    by_units: bool | None = None
    """Read queues by their units, or all of the log; None: what is less work."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What a stream was asked for: what of `read` has a meaning there, and where and how fast it goes."""

    read: ReadOptions
    starting: Offsets
    starting_ms: int | None = None
    """Where a new query begins, by store time; None: by `starting`."""
    offsets_per_trigger_max: int = 0
    """Messages of a micro-batch; 0: all that there are."""
    records_per_partition_max: int = 0
    """Messages of a task; 0: chosen by the size of the micro-batch."""
    consumer_group: str = ""
    """The group whose progress in the stores follows the query's; "" for none."""


def without_scheme(path: str) -> str:
    """The path of a folder that was given as `file:///tmp/store` or, as Hadoop writes it, `file:/tmp/store`.

    As in other URLs the scheme may be of any case, and the host this machine.
    """
    return _FILE.sub("", path, count=1)


def table_options(given: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """(naming, columns), of a read or a stream. Raises BadRequestError."""
    values = _lowered(given, "", _BOTH + _BATCH_ONLY + _STREAM_ONLY, ())
    naming = values.get("naming", NAMINGS[0])
    if naming not in NAMINGS:
        raise BadRequestError(f"option naming = {naming!r}; it is one of {', '.join(NAMINGS)}")
    columns = _words(values, "columns")
    check(naming, columns)
    return naming, columns


def read_options(given: Mapping[str, str]) -> ReadOptions:
    """Options of a batch read. Raises BadRequestError that names option, value and what it may be."""
    values = _lowered(given, "is for streams", _BOTH + _BATCH_ONLY, _STREAM_ONLY)
    selection = dataclasses.replace(
        _selection(values),
        begin_ms=_integer(values, "startingTimestamp", TIME_MIN),
        end_ms=_integer(values, "endingTimestamp", TIME_MAX),
        starting=_offsets(values, "startingOffsets", EARLIEST),
        ending=_offsets(values, "endingOffsets", LATEST),
    )
    _check_offsets(selection, startingOffsets=selection.starting, endingOffsets=selection.ending)
    _check_something_is_left(values, selection)
    return dataclasses.replace(
        _read(given, values, selection),
        split_bytes=_integer(values, "splitBytes", 0, low=0, high=1 << 50),
        clock_step_ms=_integer(values, "clockStepMs", 60_000, low=0, high=1 << 40),
        filter_pushdown=_boolean(values, "filterPushdown", False) is True,
        by_units=_boolean(values, "byUnits", None),
    )


def stream_options(given: Mapping[str, str]) -> StreamOptions:
    """Options of a stream. Raises BadRequestError that names option, value and what it may be."""
    values = _lowered(given, "is for batch reads", _BOTH + _STREAM_ONLY, _BATCH_ONLY)
    if "startingTimestamp" in values and "startingOffsets" in values:
        raise BadRequestError("options startingOffsets and startingTimestamp exclude one another in a stream")
    starting_ms = _integer(values, "startingTimestamp", 0) if "startingTimestamp" in values else None
    selection, starting = _selection(values), _starting(values)
    _check_offsets(selection, startingOffsets=starting)
    return StreamOptions(
        _read(given, values, selection),
        starting=starting,
        starting_ms=starting_ms,
        offsets_per_trigger_max=_integer(values, "maxOffsetsPerTrigger", 0, low=1, high=1 << 40),
        records_per_partition_max=_integer(values, "maxRecordsPerPartition", 0, low=1, high=1 << 40),
        consumer_group=values.get("consumerGroup", ""),
    )


def _check_offsets(selection: Selection, **given: Offsets) -> None:
    """Raise BadRequestError when offsets are given of a queue that is not read: it, or the choice, is misspelled."""
    for name, offsets in given.items():
        for topic, queue_id in offsets.by_queue:
            if not selection.takes(topic, queue_id):
                raise BadRequestError(f"option {name}: queue {queue_id} of {topic} is none of those that are read")


def _check_something_is_left(values: Mapping[str, str], of: Selection) -> None:
    """Raise BadRequestError when no message can be of a batch read's times and offsets."""
    if of.begin_ms >= of.end_ms:
        raise BadRequestError(
            f"option startingTimestamp = {of.begin_ms:,} leaves nothing to read below endingTimestamp = {of.end_ms:,}"
        )
    for queue, start in of.starting.by_queue.items():
        if 0 <= of.ending.of(*queue) < start:
            raise BadRequestError(
                f"option startingOffsets = {values['startingOffsets']!r}: {start:,} of queue {queue[1]} of {queue[0]} "
                f"lies behind its {of.ending.of(*queue):,} of endingOffsets"
            )


def _selection(values: Mapping[str, str]) -> Selection:
    found = Selection(
        topics=_topics(values),
        topic_pattern=_pattern(values),
        queues=_assigned(values),
        queue_ids=_integers(values, "queueId"),
        tags=_tags(values),
        keys=_words(values, "key"),
    )
    if found.queues and not found.named_queues():
        given = f"queueId = {values['queueId']!r}"
        raise BadRequestError(f"option {given} leaves nothing to read of assign = {values['assign']!r}")
    return found


def _read(given: Mapping[str, str], values: Mapping[str, str], selection: Selection) -> ReadOptions:
    naming, columns = table_options(given)
    return ReadOptions(
        paths=_paths(values),
        selection=selection,
        naming=naming,
        columns=columns,
        min_partitions=_integer(values, "minPartitions", 1, low=1, high=1_000_000),
        batch_rows=_integer(values, "batchRows", 32_768, low=1, high=1 << 24),
        batch_bytes=_integer(values, "batchBytes", 1 << 20, low=1, high=1 << 30),
        fail_on_data_loss=_boolean(values, "failOnDataLoss", True) is True,
        verify_crc=_boolean(values, "verifyCrc", None),
        # RocketMQ's connector gives them so, and no column of its names tells which are compressed.
        plain_bodies=_boolean(values, "plainBodies", naming == "rocketmq") is True,
    )


_SUBSCRIPTIONS: Final = ("subscribe", "topic", "subscribePattern", "assign")
_BOTH: Final = (
    *("path", "paths"),
    *_SUBSCRIPTIONS,
    *("queueId", "startingOffsets", "startingTimestamp", "tag", "subExpression", "key", "columns", "naming"),
    *("minPartitions", "batchRows", "batchBytes", "failOnDataLoss", "verifyCrc", "plainBodies"),
)
_BATCH_ONLY: Final = ("endingOffsets", "endingTimestamp", "splitBytes", "clockStepMs", "filterPushdown", "byUnits")
# What Spark's catalog adds to the options of a table.
_OF_TABLES: Final = frozenset({"owner", "location", "provider", "comment", "external", "is_managed_location"})
_STREAM_ONLY: Final = ("maxOffsetsPerTrigger", "maxRecordsPerPartition", "consumerGroup")


def _lowered(
    given: Mapping[str, str], elsewhere: str, known: tuple[str, ...], others: tuple[str, ...]
) -> dict[str, str]:
    """The given options under their own names, whose case Spark does not keep; `others` have a meaning elsewhere."""
    names, other_names = ({name.lower(): name for name in some} for some in (known, others))
    found: dict[str, str] = {}
    for name, value in given.items():
        if name.lower() in other_names:
            raise BadRequestError(f"option {other_names[name.lower()]!r} {elsewhere}")
        if name.lower() in _OF_TABLES:
            raise BadRequestError(
                f"option {name!r} is that of a table in Spark's catalog, which a store cannot be: CREATE TEMPORARY "
                "VIEW name USING mqproc OPTIONS (path '…') gives one a name"
            )
        if name.lower() not in names:
            raise BadRequestError(f"option {name!r} is not known; there are {', '.join(sorted(known))}")
        found[names[name.lower()]] = str(value)
    return found


def _paths(values: Mapping[str, str]) -> tuple[str, ...]:
    several = _texts(values, "paths") if "paths" in values else []
    paths = (*([values["path"]] if values.get("path") else []), *several)
    # An empty one would be the folder that Spark was started in.
    if not paths or "" in paths:
        raise BadRequestError("no path is given: load(path) takes a store's folder, a pattern, or a list of them")
    return paths


def _topics(values: Mapping[str, str]) -> tuple[str, ...]:
    given = [name for name in _SUBSCRIPTIONS if name in values]
    if len(given) > 1:
        raise BadRequestError(f"options {' and '.join(given)} exclude one another")
    if "topic" in values:
        return (_not_empty(values, "topic"),)
    return _words(values, "subscribe")


def _pattern(values: Mapping[str, str]) -> str:
    if "subscribePattern" not in values:
        return ""
    pattern = _not_empty(values, "subscribePattern")
    try:
        re.compile(pattern)
    except re.error as error:
        raise BadRequestError(f"option subscribePattern = {pattern!r}: {error}") from None
    return pattern


def _words(values: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Words with commas between, or a JSON list of them; () when the option is not given."""
    if name not in values:
        return ()
    text = values[name]
    words = _texts(values, name) if text.startswith("[") else [word.strip() for word in text.split(",")]
    return _some(values, name, words)


def _some(values: Mapping[str, str], name: str, words: Iterable[str]) -> tuple[str, ...]:
    """The words that are not empty, each once. Raises BadRequestError when there is none: that is not to mean all."""
    found = tuple(dict.fromkeys(word for word in words if word))
    if not found:
        raise BadRequestError(f"option {name} = {values[name]!r} names nothing; leave it out for all")
    for word in found:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise BadRequestError(f"option {name} = {word!r}: character {error.start} is half of one") from None
    return found


def _not_empty(values: Mapping[str, str], name: str) -> str:
    return _some(values, name, [values[name]])[0]


def _tags(values: Mapping[str, str]) -> tuple[str, ...]:
    """`tag` names tags as words, `subExpression` as RocketMQ does: `a || b`, and `*` or nothing for all."""
    expression = values.get("subExpression", "*")
    if expression.strip() in ("*", ""):
        return _words(values, "tag")
    if "tag" in values:
        raise BadRequestError("options tag and subExpression exclude one another")
    return _some(values, "subExpression", (tag.strip() for tag in expression.split("||")))


def _integer(values: Mapping[str, str], name: str, default: int, low: int = TIME_MIN, high: int = TIME_MAX) -> int:
    text = values.get(name)
    if text is None:
        return default
    try:
        number = int(text)
    except ValueError:
        raise BadRequestError(f"option {name} = {text!r} is no integer") from None
    if not low <= number <= high:
        raise BadRequestError(f"option {name} = {number:,} is not in [{low:,}, {high:,}]")
    return number


def _integers(values: Mapping[str, str], name: str) -> tuple[int, ...]:
    return tuple(_integer({name: word}, name, 0, low=0, high=QUEUE_ID_MAX) for word in _words(values, name))


def _boolean(values: Mapping[str, str], name: str, default: bool | None) -> bool | None:
    text = values.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false"):
        raise BadRequestError(f"option {name} = {text!r} is neither true nor false")
    return text.lower() == "true"


def _assigned(values: Mapping[str, str]) -> tuple[Queue, ...]:
    if "assign" not in values:
        return ()
    given = _json(values, "assign", list, '{"orders": [0, 1]}')
    found = [(topic, queue) for topic, queues in given.items() for queue in queues]
    if not all(type(queue_id) is int and 0 <= queue_id <= QUEUE_ID_MAX for _topic, queue_id in found):
        raise BadRequestError(f'option assign = {values["assign"]!r}; it is like {{"orders": [0, 1]}}')
    if not all(given.values()) or not found:
        raise BadRequestError(f"option assign = {values['assign']!r} names no queue; leave it out for all")
    return tuple(found)


_OFFSET_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}


def _offsets(values: Mapping[str, str], name: str, default: int) -> Offsets:
    text = values.get(name, "").lower()
    # A read from the end on, or up to the beginning, has no rows whatever is stored: a mistake.
    if text in _OFFSET_WORDS and _OFFSET_WORDS[text] != default:
        raise BadRequestError(f"option {name} = {text!r} leaves nothing to read")
    if not text or text in _OFFSET_WORDS:
        return Offsets(default)
    return Offsets(default, _by_queue(values, name, (default,)))


def _starting(values: Mapping[str, str]) -> Offsets:
    """Where a stream begins; queues that JSON does not name, at their beginning."""
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
                raise BadRequestError(f"option {name}: {offset!r} is no queue offset for queue {queue!r} of {topic!r}")
            found[topic, int(queue)] = offset
    return found


def _json(values: Mapping[str, str], name: str, kind: type[list[Any] | dict[str, Any]], like: str) -> dict[str, Any]:
    """An option's JSON: of each topic one of `kind`, as in the example `like`."""
    found = _loaded(values, name)
    if not isinstance(found, dict) or not all(isinstance(part, kind) for part in found.values()):
        raise BadRequestError(f"option {name} = {values[name]!r}; it is like {like}")
    return found


def _texts(values: Mapping[str, str], name: str) -> list[str]:
    """An option's JSON list of texts."""
    found = _loaded(values, name)
    if not isinstance(found, list) or not all(isinstance(part, str) for part in found):
        raise BadRequestError(f'option {name} = {values[name]!r}; it is like ["one", "two"]')
    return found


def _loaded(values: Mapping[str, str], name: str) -> Any:
    try:
        return json.loads(values[name])
    except json.JSONDecodeError as error:
        raise BadRequestError(f"option {name} = {values[name]!r} is no JSON: {error}") from None
