"""A log's records in plain Python, and what an invariant that does not hold is told as."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mqproc.layout.record_codec import decode_record
from mqproc.message import StoredMessage

BLANK_MAGIC = -875286124


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
        while at + 8 <= len(data):
            size, magic = (int.from_bytes(data[place : place + 4], "big", signed=True) for place in (at, at + 4))
            if magic == BLANK_MAGIC:
                break
            try:
                message = decode_record(data, at)
            except Exception:
                return found
            if message.physical_offset != start + at:
                return found
            found.append(Placed(start + at, size, message))
            at += size
    return found
