"""Byte layouts of all files, one module a format. No other module knows an offset.

Fields are declared here, and `mqproc store dump --fields` explains files by these declarations.
"""

from __future__ import annotations

from typing import Final, NamedTuple

WORD_SIZE: Final = 8


class Field(NamedTuple):
    """Bytes [offset, offset + size) of a structure, in the byte order of its format."""

    name: str
    offset: int
    size: int
    help: str = ""


def word(name: str, index: int, text: str = "") -> Field:
    """The field of an 8-byte word by its index in the structure."""
    return Field(name, index * WORD_SIZE, WORD_SIZE, text)
