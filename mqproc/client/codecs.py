"""Codecs: values in place of bytes, for bodies to send and for `message.value`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeVar

import msgspec

from mqproc.client.batch import Batch
from mqproc.errors import BadMessageError, BadRequestError
from mqproc.types import Message

T = TypeVar("T")


class Codec(Protocol):
    """Converts values to bodies and back; errors are of any type."""

    def encode(self, value: Any, /) -> bytes: ...

    def decode(self, body: bytes, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class NamedCodec:
    """A codec that is known by its name."""

    name: str

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return codec_of, (self.name,)

    def encode(self, value: Any) -> bytes:
        if self.name == "json":
            return msgspec.json.encode(value)
        return str.encode(value) if self.name == "text" else msgspec.msgpack.encode(value)

    def decode(self, body: bytes) -> Any:
        if self.name == "json":
            return msgspec.json.decode(body)
        return body.decode() if self.name == "text" else msgspec.msgpack.decode(body)


_NAMED: Final = {name: NamedCodec(name) for name in ("json", "msgpack", "text")}
CodecArgument = Literal["json", "msgpack", "text"] | Codec | None
"""A codec as clients take it."""


def codec_of(codec: Any) -> Codec | None:
    """A codec by its name, an object with its methods, or None. Raises BadRequestError."""
    if codec is None:
        return None
    if isinstance(codec, str) and codec in _NAMED:
        return _NAMED[codec]
    if isinstance(codec, str) or not all(callable(getattr(codec, name, None)) for name in ("encode", "decode")):
        names = ", ".join(_NAMED)
        raise BadRequestError(f"codec = {repr(codec)[:64]}: give {names}, or an object with encode and decode")
    made: Codec = codec
    return made


def encoded_body(codec: Codec, value: Any) -> Any:
    """The body for a value; bytes are a body already, and None is left to the checks.

    Raises BadMessageError.
    """
    if value is None or isinstance(value, bytes | bytearray | memoryview):
        return value
    try:
        return codec.encode(value)
    except Exception as error:  # Of any codec.
        shown = f"{repr(value)[:64]} of type {type(value).__name__}"
        raise BadMessageError(f"the codec {codec!r} cannot encode {shown}: {error}") from error


def encoded(codec: Codec, message: T) -> T:
    """A Message with its value as body; others are left to the checks."""
    if not isinstance(message, Message) or isinstance(message.body, bytes):
        return message
    return msgspec.structs.replace(message, body=encoded_body(codec, message.body))


def encoded_arguments(codec: Codec, topic: T, body: Any) -> tuple[T, Any]:
    """The first arguments of `send`: a Message, or a topic and a value."""
    return encoded(codec, topic), encoded_body(codec, body)


def encoded_bodies(codec: Codec, bodies: Any) -> Any:
    """A list of values as bodies; arrays are bodies already."""
    return [encoded_body(codec, value) for value in bodies] if isinstance(bodies, list | tuple) else bodies


def encoded_messages(codec: Codec, messages: Iterable[Any]) -> Iterator[Any]:
    """A stream of messages, or of batches, with their values as bodies."""
    for each in messages:
        if isinstance(each, Batch):
            yield msgspec.structs.replace(each, bodies=encoded_bodies(codec, each.bodies))
        else:
            yield encoded(codec, each)


def own_value(value: Any) -> Any:
    """A copy of a value, or of a Message with one, independent of the caller's."""
    if not isinstance(value, Message):
        return copy.deepcopy(value)
    return value if isinstance(value.body, bytes) else msgspec.structs.replace(value, body=copy.deepcopy(value.body))
