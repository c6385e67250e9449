"""What all options on the wire have in common, and what is said of those that cannot be."""

from __future__ import annotations

import operator
import re
from typing import Any, Final

import msgspec

from mqproc.errors import BadRequestError

_SHOWN_MAX: Final = 64
BOOLS: Final = ("bool", "bool_")
"""What Python's and numpy's own truths are called: by name, since not all who send options need load numpy."""
# msgspec tells of a field that it is no … at `$[2]`, or further in it.
_PLACE = re.compile(r"(.*?)(?: - at `\$\[(\d+)\].*`)", re.DOTALL)
_decode = msgspec.msgpack.Decoder().decode


class Options(msgspec.Struct, array_like=True, frozen=True):
    """Base of all options: an array on the wire, so that a field added at the end is read as its default."""


def _plain(value: Any) -> Any:
    """What msgspec asks for a value that it does not know: numpy's numbers and texts are numbers and texts."""
    if isinstance(value, str):
        return str(value)
    return bool(value) if type(value).__name__ in BOOLS else operator.index(value)


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_UNENCODABLE: Final = (TypeError, UnicodeError, OverflowError)


def encoded(options: Options) -> bytes:
    """A request's options as they are sent. Raises BadRequestError naming the first field that cannot be."""
    try:
        return _encode(options)
    except _UNENCODABLE:
        raise _not_encodable(options) from None


def _not_encodable(options: Options) -> BadRequestError:
    for name in options.__struct_fields__:
        value = getattr(options, name)
        try:
            _encode(value)
        except _UNENCODABLE as error:
            return BadRequestError(f"{name} = {_shown(value)} cannot be sent: {error}")
    return BadRequestError(f"options cannot be sent: {options!r}")


def not_decodable(operation: str, kind: type[Options], options: Any, error: Exception) -> BadRequestError:
    """What is said of options that are none of their kind: the field that is not, where it is known."""
    found = _PLACE.fullmatch(str(error))
    if found is None or int(found[2]) >= len(kind.__struct_fields__):
        return BadRequestError(f"options of {operation}: {error}")
    number = int(found[2])
    name = kind.__struct_fields__[number]
    return BadRequestError(f"options of {operation}: {name}{_value_at(options, number)}: {found[1]}")


def _value_at(options: Any, number: int) -> str:
    try:
        return f" = {_shown(_decode(options)[number])}"
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""  # What comes behind it cannot be read at all.


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"
