"""Arguments of StoreReader's methods: type checks with clear errors, serialized calls."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from mqproc.errors import BadRequestError
from mqproc.util.arguments import BOOLEAN_TYPE_NAMES


class SerializedCalls(Protocol):
    """An object whose calls are serialized by a lock."""

    @property
    def _lock(self) -> AbstractContextManager[Any]: ...


A = TypeVar("A", bound=SerializedCalls)
P = ParamSpec("P")
R = TypeVar("R", bound=Any)
T = TypeVar("T")
_INT64: Final = range(-(1 << 63), 1 << 63)
_SHOWN_CHARACTERS: Final = 64


def checked_call(method: Callable[Concatenate[A, P], T]) -> Callable[Concatenate[A, P], T]:
    """Decorate a method to check its arguments by their annotations. Raises BadRequestError.

    numpy scalars are converted to Python's. Calls hold the object's lock, except for generators, which take it per
    page.
    """
    _, *parameters = inspect.signature(method).parameters.values()
    places = [(parameter.name, _PLAIN.get(str(parameter.annotation), _as_it_is)) for parameter in parameters]
    plain = dict(places)
    pages = inspect.isgeneratorfunction(method)

    @functools.wraps(method)
    def call(self: A, /, *positional: Any, **named: Any) -> T:
        # The method itself rejects surplus and unknown arguments.
        values = [plain_of(name, value) for (name, plain_of), value in zip(places, positional, strict=False)]
        values += positional[len(places) :]
        for name in named:
            named[name] = plain.get(name, _as_it_is)(name, named[name])
        if pages:
            return method(self, *values, **named)
        with self._lock:
            return method(self, *values, **named)

    return call


def checked_fields(record: R) -> R:
    """Check the fields of a dataclass by their annotations. Raises BadRequestError."""
    return dataclasses.replace(
        record,
        **{
            field.name: _PLAIN.get(str(field.type), _as_it_is)(field.name, getattr(record, field.name))
            for field in dataclasses.fields(record)
        },
    )


def _as_it_is(name: str, value: Any) -> Any:
    return value


def _whole_number(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise _error(name, value, "a whole number") from None
    if number not in _INT64:
        raise _error(name, value, "a number of 64 bits")
    return number


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _error(name, value, "text")
    return value


def _bytes(name: str, value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise _error(name, value, "bytes")
    return bytes(value)


def _flag(name: str, value: Any) -> bool:
    # numpy's types are recognized by name: not every reader has loaded numpy.
    if not isinstance(value, bool) and type(value).__name__ not in BOOLEAN_TYPE_NAMES:
        raise _error(name, value, "true or false")
    return bool(value)


def _texts(name: str, value: Any) -> Sequence[str]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise _error(name, value, "a list of texts")
    texts = [_text(name, one) for one in value]
    for text in texts:
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise _error(name, text, "UTF-8")
    return texts


def _whole_number_or_none(name: str, value: Any) -> int | None:
    return None if value is None else _whole_number(name, value)


def _error(name: str, value: Any, expected: str) -> BadRequestError:
    return BadRequestError(f"{name} = {repr(value)[:_SHOWN_CHARACTERS]} is not {expected}")


_PLAIN: Final[dict[str, Callable[[str, Any], Any]]] = {
    "int": _whole_number,
    "int | None": _whole_number_or_none,
    "str": _text,
    "bytes": _bytes,
    "bool": _flag,
    "Sequence[str]": _texts,
}
