"""A log's records in plain Python, and what an invariant that does not hold is told as."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mqproc.layout.record import BLANK_SIZE, BODY, IPV6_EXTRA
from mqproc.layout.record_codec import check_record, decode_record, fixed_of
from mqproc.types import StoredMessage

# More than a story's log has.
RECORDS_KEPT = 4_096
# What lies before a body at most: both hosts have IPv6 addresses.
HEAD_MAX = BODY + 2 * IPV6_EXTRA


class Broken(AssertionError):
    """An invariant does not hold."""


def expect(true: bool, what: str) -> None:
    """Raise Broken unless it is true."""
    if not true:
        raise Broken(what)


@contextlib.contextmanager
def must_end_well(who: str) -> Iterator[None]:
    """Whatever error ends a role or a recovery breaks an invariant."""
    try:
        yield
    except (Broken, ImportError):
        raise
    except Exception as error:
        raise Broken(f"{who} ended with {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Placed:
    """A record as it lies in the log."""

    offset: int
    size: int
    message: StoredMessage


def walk_log(commit_log: Path) -> list[Placed]:
    """Every record from the first segment on, in plain Python, up to the first that is not whole."""
    found: list[Placed] = []
    segments = sorted(path for path in commit_log.iterdir() if path.name.isdigit())
    expected = int(segments[0].name) if segments else 0
    for path in segments:
        start = int(path.name)
        if start != expected:
            break
        data = path.read_bytes()
        expected = start + len(data)
        at = 0
        while placed := _record(start + at, _bytes_of_record(data, at)):
            if placed.message.physical_offset != placed.offset:
                return found
            found.append(placed)
            at += placed.size
        if len(data) - at >= BLANK_SIZE and not check_record(data, at).success:
            return found
    return found


def _bytes_of_record(data: bytes, at: int) -> bytes:
    """As many as the record at a place says that it has; at a segment's end all that are left."""
    head = data[at : at + HEAD_MAX]
    return data[at : at + max(0, fixed_of(head)[0])] if len(head) == HEAD_MAX else head


@functools.lru_cache(RECORDS_KEPT)
def _record(offset: int, data: bytes) -> Placed | None:
    """The record that these bytes are, as it lies at `offset`; None when they are none.

    One that was looked at in an image, or a moment ago, is the same in most of the next ones.
    """
    check = check_record(data)
    if not check.success or not check.size:
        return None
    return Placed(offset, check.size, decode_record(data, check_crc=False))
