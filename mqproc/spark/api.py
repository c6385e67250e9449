"""Messages of stores as a DataFrame, by arguments instead of options."""

from __future__ import annotations

import datetime
import json
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqproc.errors import BadRequestError
from mqproc.spark.options import ReadOptions, read_options
from mqproc.spark.session import register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from mqproc.spark.mapped import BatchRead

Moment = int | datetime.datetime
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
# Arguments that are options of the source by another name, or in other words.
_WORDS: Final = {"topic": "subscribe", "queue_id": "queueId", "tag": "tag", "key": "key", "columns": "columns"}
_MOMENTS: Final = {"begin": "startingTimestamp", "end": "endingTimestamp"}
_OFFSETS: Final = {"starting_offsets": "startingOffsets", "ending_offsets": "endingOffsets"}
_ARGUMENTS: Final = frozenset({*_WORDS, *_MOMENTS, *_OFFSETS, "fail_on_data_loss"})
# The options of the source that jobs go by themselves, in the case that Spark takes for all.
_OF_JOBS: Final = frozenset({"failondataloss", "verifycrc", "plainbodies"})


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be read: paths, options as Spark takes them, and what they mean."""

    paths: list[str]
    given: dict[str, str]
    options: ReadOptions


def messages(
    spark: SparkSession,
    path: str | Path | Sequence[str | Path],
    *,
    topic: str | Sequence[str] = (),
    queue_id: int | Sequence[int] = (),
    begin: Moment | None = None,
    end: Moment | None = None,
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

    begin ≤ store time < end, in Unix ms or as a datetime with a zone; one of the tags, one of the keys; of `columns`
    only these are read. An empty tuple means all, as if it were left out; an empty list is a mistake. Words of a list
    are taken as they are, in a text commas divide them. `options` are further ones of the source, by its names. Raises
    BadRequestError for what is no option or column, and no value of one.

    The rows are those of `spark.read.format("mqproc")`, for less work of Spark's: see `mapped`.

        messages(spark, "/var/lib/store", topic="orders", columns=["queue_offset", "body"]).count()
    """
    asked = _asked_for(
        path,
        {
            "topic": topic,
            "queue_id": queue_id,
            "begin": begin,
            "end": end,
            "tag": tag,
            "key": key,
            "columns": columns,
            "starting_offsets": starting_offsets,
            "ending_offsets": ending_offsets,
            "naming": naming,
            "fail_on_data_loss": fail_on_data_loss,
            **options,
        },
    )
    register(spark)
    if asked.options.filter_pushdown:
        # Filters of the query reach a source, and nothing behind it.
        return spark.read.format("mqproc").options(**asked.given).load(asked.paths)
    return _planned(spark, asked).rows()


def planned_messages(spark: SparkSession, path: str | Path | Sequence[str | Path], **selection: Any) -> BatchRead:
    """The read that `messages` would make rows of, by the same arguments. Raises what it raises."""
    return _planned(spark, _asked_for(path, selection))


def _planned(spark: SparkSession, asked: _Asked) -> BatchRead:
    from mqproc.spark.mapped import planned

    return planned(spark, asked.paths, asked.given, asked.options)


def _asked_for(path: str | Path | Sequence[str | Path], said: Mapping[str, Any]) -> _Asked:
    """What arguments of `messages` ask for, which say nothing where they are missing."""
    given = {"failOnDataLoss": said.get("fail_on_data_loss", True)}
    given |= {name: value for name, value in said.items() if name not in _ARGUMENTS}
    for argument, option in _WORDS.items():
        words = _words(argument, said.get(argument, ()))
        if words is not None and (argument != "columns" or words != "[]"):
            given[option] = words
    for argument, option in _MOMENTS.items():
        if (moment := said.get(argument)) is not None:
            given[option] = _ms(argument, moment)
    for argument, option in _OFFSETS.items():
        if (offsets := said.get(argument)) is not None:
            given[option] = _offsets(argument, offsets)
    paths = [str(path)] if isinstance(path, str | Path) else [str(each) for each in path]
    text = _text(given)
    return _Asked(paths, text, read_options(text | {"paths": json.dumps(paths)}))


def keys_of(key: str | Sequence[str]) -> tuple[str, ...]:
    """Which keys `messages` takes for its argument `key`; () for all."""
    said = _words("key", key)
    return () if said is None else read_options({"path": ".", "key": said}).selection.keys


def flags_of(selection: Mapping[str, Any]) -> ReadOptions:
    """What arguments of `messages` say of damage, CRCs and packed bodies, by its names or the source's, in any case.

    Only `fail_on_data_loss`, `verify_crc` and `plain_bodies` of the answer are the selection's. Raises BadRequestError
    for what is no value of one.
    """
    given = {name: value for name, value in selection.items() if name.lower() in _OF_JOBS}
    fails = {"failOnDataLoss": selection.get("fail_on_data_loss", True)}
    return read_options({"path": "."} | _text(fails | given))


def _text(given: Mapping[str, Any]) -> dict[str, str]:
    """Options as Spark takes them."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}


def _words(name: str, words: object) -> str | None:
    """What an option says for a word or several; None for an empty tuple."""
    if isinstance(words, str):
        return words
    if isinstance(_plain(words), int):
        return str(words).lower()
    if not isinstance(words, Iterable):
        raise BadRequestError(f"{name} = {words!r} is neither a word nor several")
    if isinstance(words, tuple) and not words:
        return None
    # As JSON a word may have commas.
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
    """Python's integer for any other's, such as numpy's."""
    return value if isinstance(value, bool) or not isinstance(value, numbers.Integral) else int(value)


def _ms(name: str, moment: Moment) -> int:
    """The first whole millisecond at or after a moment: stores keep no less."""
    if isinstance(moment, datetime.datetime) and moment.tzinfo is not None:
        return -((_EPOCH - moment) // datetime.timedelta(milliseconds=1))
    ms = _plain(moment)
    if type(ms) is not int:
        raise BadRequestError(f"{name} = {moment!r} is neither Unix ms as an int nor a datetime with a time zone")
    return ms
