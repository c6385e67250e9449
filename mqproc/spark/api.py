"""Messages of stores as a DataFrame, by arguments instead of options."""

from __future__ import annotations

import datetime
import json
import numbers
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqproc.errors import BadRequestError
from mqproc.spark.options import ReadOptions, read_options
from mqproc.spark.session import register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Moment = int | datetime.datetime
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
# The options of the source that jobs go by themselves, in the case that Spark takes for all.
_OF_JOBS: Final = frozenset({"failondataloss", "verifycrc", "plainbodies"})


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
    given: dict[str, str | int | bool] = {"naming": naming, "failOnDataLoss": fail_on_data_loss, **options}
    chosen = (
        ("subscribe", "topic", topic),
        ("queueId", "queue_id", queue_id),
        ("tag", "tag", tag),
        ("key", "key", key),
        ("columns", "columns", columns),
    )
    for name, argument, words in chosen:
        said = _words(argument, words)
        if said is not None and (name != "columns" or said != "[]"):
            given[name] = said
    for name, argument, moment in (("startingTimestamp", "begin", begin), ("endingTimestamp", "end", end)):
        if moment is not None:
            given[name] = _ms(argument, moment)
    for name, argument, offsets in (
        ("startingOffsets", "starting_offsets", starting_offsets),
        ("endingOffsets", "ending_offsets", ending_offsets),
    ):
        if offsets is not None:
            given[name] = _offsets(argument, offsets)
    paths = [str(path)] if isinstance(path, str | Path) else [str(each) for each in path]
    register(spark)
    text = _text(given)
    read = read_options(text | {"paths": json.dumps(paths)})
    if read.filter_pushdown:
        # Filters of the query reach a source, and nothing behind it.
        return spark.read.format("mqproc").options(**text).load(paths)
    from mqproc.spark.mapped import mapped

    return mapped(spark, paths, text, read)


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
