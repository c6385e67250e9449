"""Refusals by error code in the control file: the role with the socket adds, everybody reads."""

from __future__ import annotations

from collections.abc import Callable

from mqproc.ipc.words import Words
from mqproc.layout.figures import CODES, REJECTS

_PLACES = {code: place for place, code in enumerate(CODES)}


def code_counter(words: Words, role: str) -> Callable[[str], None]:
    """A function that counts one refusal with a code of the error tree."""
    first = REJECTS[role]
    return lambda code: words.add(first + _PLACES[code], 1)


def read_code_counts(words: Words, role: str) -> dict[str, int]:
    """Refusals by code, all codes."""
    first = REJECTS[role]
    return {code: words[first + place] for place, code in enumerate(CODES)}
