"""Encoding of request options, and errors for invalid ones."""

from __future__ import annotations

import operator
import re
from typing import Any, Final

import msgspec

from mqproc.errors import BadRequestError
from mqproc.util.arguments import BOOLEAN_TYPE_NAMES

_SHOWN_MAX: Final = 64
# msgspec reports a field as `$[2]`, or deeper.
_PLACE = re.compile(r"(.*?)(?: - at `\$\[(\d+)\].*`)", re.DOTALL)
_decode = msgspec.msgpack.Decoder().decode


class FrameOptions(msgspec.Struct, array_like=True, frozen=True):
    """Base of all options: an array on the wire, so that fields added at the end have defaults."""


def _plain(value: Any) -> Any:
    """Convert numpy's numbers, booleans and strings for msgspec."""
    if isinstance(value, str):
        return str(value)
    return bool(value) if type(value).__name__ in BOOLEAN_TYPE_NAMES else operator.index(value)


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_UNENCODABLE: Final = (TypeError, UnicodeError, OverflowError)


def encoded(options: FrameOptions) -> bytes:
    """Encode a request's options. Raises BadRequestError that names the first invalid field."""
    try:
        return _encode(options)
    except _UNENCODABLE:
        raise _not_encodable(options) from None


def _not_encodable(options: FrameOptions) -> BadRequestError:
    for name in options.__struct_fields__:
        value = getattr(options, name)
        try:
            _encode(value)
        except _UNENCODABLE as error:
            return BadRequestError(f"{name} = {_shown(value)} cannot be sent: {error}")
    return BadRequestError(f"options cannot be sent: {options!r}")


def not_decodable(operation: str, kind: type[FrameOptions], options: Any, error: Exception) -> BadRequestError:
    """The error for options that do not decode; names the field if known."""
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
        return ""  # The array is unreadable after this field.


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"
