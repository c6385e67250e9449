"""Counters of refusals by error code in the control file, one set per role with a socket."""

from __future__ import annotations

from collections.abc import Callable

from mqproc.ipc.words import Words
from mqproc.layout.histograms import CODES, REJECTS

_PLACES = {code: place for place, code in enumerate(CODES)}


def error_counter(words: Words, role: str) -> Callable[[str], None]:
    """Return a function that counts a refusal by its error code."""
    first = REJECTS[role]
    return lambda code: words.add(first + _PLACES[code], 1)


def read_error_counters(words: Words, role: str) -> dict[str, int]:
    """Refusals by code, for all codes."""
    first = REJECTS[role]
    return {code: words[first + place] for place, code in enumerate(CODES)}
