"""JSON that may be anything: what is none of a type is refused in one way."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode_json(text: bytes, kind: type[T]) -> T:
    """A text's value as a type that msgspec knows. Raises msgspec.MsgspecError for what is none, no UTF-8 included."""
    try:
        return msgspec.json.decode(text, type=kind)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
