"""Decoding of JSON from any source, with one error type for invalid input."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode_json(text: bytes, kind: type[T]) -> T:
    """Decode JSON to a type. Raises msgspec.MsgspecError, also for invalid UTF-8."""
    try:
        return msgspec.json.decode(text, type=kind)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
