"""Declarations of fixed fields, for tools that explain the bytes of a file: see `mqproc store dump --fields`."""

from __future__ import annotations

from typing import Final, NamedTuple

WORD_SIZE: Final = 8


class Field(NamedTuple):
    """Bytes [offset, offset + size) of a structure. Each format fixes the byte order of its numbers."""

    name: str
    offset: int
    size: int
    help: str = ""


def word(name: str, index: int, text: str = "") -> Field:
    """The field of an 8-byte word by its index in the structure."""
    return Field(name, index * WORD_SIZE, WORD_SIZE, text)
