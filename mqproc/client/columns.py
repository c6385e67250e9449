"""Columns of an append frame: lengths and bytes of all messages.

Values may be lists, numpy arrays or Arrow arrays; the buffers of Arrow arrays and slices are sent without a copy.
"""

from __future__ import annotations

import functools
import re
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.client.message_fields import check_keys, is_whole
from mqproc.errors import (
    BadMessageError,
    BadPropertyError,
    NoSuchQueueError,
    PropertiesTooLargeError,
)
from mqproc.layout.properties import KEY_SEPARATOR, NAME_END, PAIR_END
from mqproc.layout.record import PROPERTIES_SIZE_MAX
from mqproc.topic_names import check_matchable
from mqproc.wire.operations import COLUMN_ABSENT

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Bodies of this mean size or more are sent from their own memory; smaller bodies are joined.
_SCATTERED_BODY_BYTES: Final = 16 << 10
_LENGTH = np.dtype("<u4")
assert array("I").itemsize == _LENGTH.itemsize
_SHORT_LENGTH = np.dtype("<u2")
# Arrow's arrays of texts and binaries by class name, which is cheaper to compare than the type.
_OFFSET_TYPES: Final = {
    "BinaryArray": np.int32,
    "StringArray": np.int32,
    "LargeBinaryArray": np.int64,
    "LargeStringArray": np.int64,
}
_SHOWN_CHARACTERS: Final = 64
# Types of addresses in the format of a buffer, which may name its fields.
_POINTERS: Final = frozenset("OPX&")
_FIELD_NAMES: Final = re.compile(":[^:]*:")
_TEXT_HINT: Final = "; give its encode()"
_TEXT_ARRAYS: Final = ("StringArray", "LargeStringArray")

Texts = Any
"""Keys or tags: one text for all, a list of texts, or an Arrow string array; keys also a list of lists of texts."""


class Column(msgspec.Struct, frozen=True, eq=False):
    """Values of all messages.

    `size` is the sum of `lengths`; `longest` is the largest, for texts.

    `pieces` are the bytes to send: the lengths, then the values one after the other.
    """

    lengths: NDArray[Any]
    size: int
    pieces: list[ReadableBuffer]
    longest: int = 0


NO_COLUMN: Final = Column(np.empty(0, np.uint16), COLUMN_ABSENT, [])
"""A field that no message has."""


# Bodies


def _lengths_of(values: Sequence[Any]) -> NDArray[np.uint32]:
    """Lengths as u32; a list and an array take three quarters of the time of np.fromiter."""
    return np.frombuffer(array("I", list(map(len, values))), _LENGTH)


def encode_bodies(bodies: Any) -> Column:
    """Encode bodies in any form of `Batch.bodies`. Raises BadMessageError."""
    check_form(bodies)
    if isinstance(bodies, np.ndarray):
        return _numpy_bodies(bodies)
    return _arrow_bodies(bodies) if is_arrow(bodies) else list_bodies(bodies)


def check_form(bodies: Any) -> None:
    """Raise BadMessageError unless bodies are a list or an array."""
    if isinstance(bodies, np.ndarray) or is_arrow(bodies):
        return
    if isinstance(bodies, str | bytes | bytearray | memoryview) or not isinstance(bodies, Sequence):
        raise no_bodies(bodies)


def no_bodies(bodies: Any) -> BadMessageError:
    """The error for bodies in another form."""
    text = f"bodies must be a list of bytes, or a numpy or Arrow array, not {type(bodies).__name__}"
    return BadMessageError(f"{text}{list_hint(bodies)}")


def list_hint(values: Any) -> str:
    """Hint for a column of pandas or polars; "" for other values."""
    return "; give its to_list()" if hasattr(values, "to_list") else ""


def list_bodies(bodies: Sequence[Any]) -> Column:
    """Encode a list of bytes. Raises BadMessageError."""
    try:
        lengths = _lengths_of(bodies)
        size = int(lengths.sum(dtype=np.int64))
        if size < len(bodies) * _SCATTERED_BODY_BYTES:
            joined = b"".join(bodies)
            if len(joined) == size:
                return Column(lengths, size, [lengths.data, joined])
    except (TypeError, BufferError, OverflowError):
        pass  # The next step raises the error.
    return _viewed_bodies(bodies)


def _viewed_bodies(bodies: Sequence[Any]) -> Column:
    """Encode bodies that are large, or whose items are larger than a byte."""
    views = list(map(_view_of, bodies, range(len(bodies))))
    try:
        lengths = _lengths_of(views)
    except OverflowError:
        raise BadMessageError(f"a body has {max(map(len, views)):,} bytes") from None
    size = int(lengths.sum(dtype=np.int64))
    if size < len(bodies) * _SCATTERED_BODY_BYTES:
        return Column(lengths, size, [lengths.data, b"".join(views)])
    return Column(lengths, size, [lengths.data, *filter(None, views)])


def _view_of(body: Any, index: int) -> memoryview:
    try:
        return _memory_of(body)
    except (TypeError, ValueError, BufferError) as error:
        shown = _hint(body, error)
        raise BadMessageError(f"body {index:,} is a {type(body).__name__}, not bytes{shown}") from None


def as_bytes(body: Any) -> bytes:
    """One message's body. Raises BadMessageError."""
    try:
        return _memory_of(body).tobytes()
    except (TypeError, ValueError, BufferError) as error:
        raise BadMessageError(f"body must be bytes, not {type(body).__name__}{_hint(body, error)}") from None


def _hint(body: Any, error: Exception) -> str:
    if isinstance(body, dict | list | tuple):
        return "; Client(codec='json') sends such values"
    return _TEXT_HINT if isinstance(body, str) else f": {error}"


def body_bytes(body: Any) -> int:
    """Size of a body in bytes, which is not the `len` of an array.

    Raises TypeError for a value without a size.
    """
    try:
        return memoryview(body).nbytes
    except (TypeError, ValueError, BufferError):
        return len(body)  # Not a valid body: encoding it raises the error.


def own_pieces(pieces: Sequence[ReadableBuffer]) -> list[ReadableBuffer]:
    """Pieces that no change of the caller's objects affects, also when they are sent again.

    Bytes and Arrow's buffers do not change; others are copied.
    """
    return [piece if _never_changes(piece) else bytes(piece) for piece in pieces]


def _never_changes(piece: ReadableBuffer) -> bool:
    owner = piece.obj if isinstance(piece, memoryview) else piece
    return isinstance(owner, bytes) or is_arrow(owner)


def _memory_of(body: Any) -> memoryview:
    """A body's memory. Raises TypeError, ValueError, BufferError without it."""
    if type(body) is bytes:
        return memoryview(body)
    if isinstance(body, np.generic) and not isinstance(body, bytes):
        raise TypeError("a number, a moment or a text")  # A numpy scalar has memory, but is not a body.
    view = memoryview(body)
    if _POINTERS & set(_FIELD_NAMES.sub("", view.format)):
        raise TypeError(f"its items are addresses of objects (buffer format {view.format!r})")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _refuse_masked(values: Any, name: str) -> None:
    """Refuse masked values, like Arrow's nulls."""
    is_subclass = isinstance(values, np.ndarray) and type(values) is not np.ndarray  # np.ma takes 30 ms to import
    if is_subclass and np.ma.is_masked(values):
        masked = np.count_nonzero(np.ma.getmaskarray(values))
        raise BadMessageError(f"{name}: {masked:,} of {values.size:,} are masked")


def _numpy_bodies(bodies: NDArray[Any]) -> Column:
    _refuse_masked(bodies, "bodies")
    if bodies.dtype == np.uint8 and bodies.ndim == 2:
        rows = np.ascontiguousarray(bodies)
        lengths = _equal_lengths(*rows.shape)
        return Column(lengths, rows.nbytes, [lengths.data, rows.reshape(-1).data])
    if bodies.dtype.kind == "S" and bodies.ndim == 1:
        return _padded_bodies(np.ascontiguousarray(bodies))
    if bodies.dtype.kind == "O" and bodies.ndim == 1:
        return list_bodies(bodies.tolist())
    raise BadMessageError(f"bodies: a numpy array of {bodies.dtype} with {bodies.ndim} dimensions is no list of bodies")


@functools.lru_cache(maxsize=8)
def _equal_lengths(count: int, width: int) -> NDArray[np.uint32]:
    """Read-only lengths of rows, cached since a producer's frames are mostly alike."""
    lengths = np.full(count, width, _LENGTH)
    lengths.setflags(write=False)
    return lengths


def _padded_bodies(bodies: NDArray[np.bytes_]) -> Column:
    """Encode texts that numpy pads with zero bytes to one width; the padding is not sent."""
    width = bodies.dtype.itemsize
    lengths = np.strings.str_len(bodies).astype(_LENGTH)
    rows = bodies.view(np.uint8).reshape(len(bodies), width)
    size = int(lengths.sum(dtype=np.int64))
    data = rows.reshape(-1) if size == rows.size else rows[np.arange(width) < lengths[:, None]]
    return Column(lengths, size, [lengths.data, data.data])


def is_arrow(values: Any) -> bool:
    """Whether a value is an object of pyarrow, without importing it."""
    return _is_of_arrow(type(values).__module__)


def is_array(values: Any) -> bool:
    """Whether a value is a numpy array with rows."""
    return isinstance(values, np.ndarray) and values.ndim > 0


@functools.lru_cache(maxsize=256)
def _is_of_arrow(module: str) -> bool:
    return module.partition(".")[0] == "pyarrow"


def _plain_arrow(values: Any, name: str) -> Any:
    """An Arrow array of texts or binaries with offsets and bytes, or of one width.

    Raises BadMessageError.
    """
    kind = type(values).__name__
    if kind == "ChunkedArray":
        values = values.combine_chunks()
        kind = type(values).__name__
    return values if kind in _OFFSET_TYPES or kind == "FixedSizeBinaryArray" else _cast_arrow(values, name)


def _arrow_column(values: Any) -> tuple[NDArray[Any], memoryview]:
    """Sizes and bytes of a plain Arrow array; the bytes are a view of its buffer."""
    kind = type(values).__name__
    if kind == "FixedSizeBinaryArray":
        return _fixed_column(values)
    count = len(values)
    if not count:
        return np.empty(0, np.int64), memoryview(b"")
    _, offsets_buffer, data_buffer = values.buffers()
    first = values.offset
    offsets = np.frombuffer(offsets_buffer, _OFFSET_TYPES[kind])[first : first + count + 1]
    data = memoryview(data_buffer or b"").cast("B")
    return offsets[1:] - offsets[:-1], data[offsets.item(0) : offsets.item(-1)]


def _fixed_column(values: Any) -> tuple[NDArray[Any], memoryview]:
    width, start, count = values.type.byte_width, values.offset, len(values)
    data = memoryview(values.buffers()[1] or b"")
    return np.full(count, width, np.int64), data[start * width : (start + count) * width]


def _cast_arrow(values: Any, name: str) -> Any:
    """Cast dictionary and view types to plain types.

    pyarrow raises ValueError and NotImplementedError.
    """
    kind = arrow_type(values, name)
    try:
        plain = values.dictionary_decode() if kind.startswith("dictionary") else values
        return plain.cast("large_string" if str(plain.type).startswith("string") else "large_binary")
    except (ValueError, NotImplementedError):
        raise BadMessageError(f"{name}: an Arrow array of {kind} holds neither binaries nor texts") from None


def arrow_type(values: Any, name: str) -> str:
    """Type of an Arrow array's values. Raises BadMessageError for other objects of pyarrow."""
    if not type(values).__name__.endswith("Array"):
        raise BadMessageError(f"{name}: a {type(values).__name__} of pyarrow's is no array")
    return str(values.type)


def arrow_texts(values: Any, name: str) -> Any:
    """An Arrow array of texts, with "" for nulls; binaries of UTF-8 become texts."""
    texts = _plain_arrow(values, name)
    if type(texts).__name__ not in _TEXT_ARRAYS:
        binaries = texts.cast("large_binary")
        try:
            texts = binaries.cast("large_string")
        except ValueError:
            raise BadPropertyError(f"{name}: {_first_no_text(binaries)!r} is not UTF-8") from None
    return texts.fill_null("") if texts.null_count else texts


def _first_no_text(values: Any) -> Any:
    return next(value for value in values.drop_null().to_pylist() if value.decode("utf-8", "replace").encode() != value)


def _arrow_bodies(bodies: Any) -> Column:
    bodies = _plain_arrow(bodies, "bodies")
    if bodies.null_count:
        raise BadMessageError(f"bodies: {bodies.null_count:,} of {len(bodies):,} are null")
    sizes, data = _arrow_column(bodies)
    if len(sizes) and int(sizes.max()) >= 1 << 32:
        raise BadMessageError(f"a body has {int(sizes.max()):,} bytes")
    lengths = sizes.astype(_LENGTH)
    return Column(lengths, len(data), [lengths.data, data])


# Texts


def encode_keys(keys: Texts, count: int) -> Column:
    """Encode keys, each message's keys joined by a space. Raises BadPropertyError."""
    if isinstance(keys, str):
        check_keys((keys,))
        return encode_texts([keys] * count, count, "keys")
    values = as_list(keys, "keys")
    joined = None if values is None else _join_texts(values)
    if values is not None and joined is None:
        return encode_texts(_joined_keys_of(values), count, "keys")
    column = _text_column(keys if values is None else values, joined, count, "keys")
    _refuse_bytes(column, "keys", NAME_END + PAIR_END + KEY_SEPARATOR)
    return column


def _joined_keys_of(values: Sequence[Any]) -> list[str]:
    """Join each message's keys; the error names the first message with invalid keys."""
    try:
        return [joined_keys(value) for value in values]
    except BadPropertyError:
        if len(values) == 1:
            raise
    for row, value in enumerate(values):
        try:
            joined_keys(value)
        except BadPropertyError as error:
            raise BadPropertyError(f"message {row:,}: {error}") from None
    raise AssertionError("keys were refused and then accepted")


def joined_keys(keys: Any) -> str:
    """Join one message's keys, given as a text, a sequence of texts, or None."""
    if keys is None or (isinstance(keys, Sequence) and not keys):
        return ""
    several = (keys,) if isinstance(keys, str) else keys
    check_keys(several)
    return KEY_SEPARATOR.join(several)


def encode_tags(tags: Texts, count: int) -> Column:
    """Encode tags. Raises BadPropertyError."""
    column = encode_texts(tags, count, "tags")
    _refuse_bytes(column, "tags", NAME_END + PAIR_END)
    _refuse_unmatchable(column)
    return column


_ODD_ENDS: Final = np.zeros(256, np.bool_)
"""Bytes at an end of a tag that make a closer check necessary: `*`, white space, and parts of such characters."""
_ODD_ENDS[: ord(" ") + 1] = _ODD_ENDS[ord("*")] = _ODD_ENDS[0x80:] = True


def _refuse_unmatchable(column: Column) -> None:
    """Raise BadPropertyError for tags that no filter can match; checks most of them at once."""
    _, values = column.pieces
    data = values if type(values) is bytes else bytes(values)
    if not data:
        return
    found = column.lengths > 0
    ends = np.cumsum(column.lengths, dtype=np.int64)[found]
    begins, octets = ends - column.lengths[found], np.frombuffer(data, np.uint8)
    odd = _ODD_ENDS[octets[begins]] | _ODD_ENDS[octets[ends - 1]]
    rows = range(len(ends)) if b"||" in data else np.flatnonzero(odd).tolist()
    for tag in {data[begins[row] : ends[row]] for row in rows}:
        check_matchable(tag.decode("utf-8", "replace"))


def encode_sharding_keys(keys: Texts, count: int) -> Column:
    """Encode sharding keys; None and "" are absent, NO_COLUMN when no message has one."""
    texts = [keys] * count if isinstance(keys, str) else keys
    column = encode_texts(texts, count, "sharding keys")
    _refuse_bytes(column, "sharding keys", NAME_END + PAIR_END)
    return column if column.size else NO_COLUMN


def encode_texts(texts: Texts, count: int, name: str) -> Column:
    """Encode short texts, one per message; None and "" are absent."""
    values = as_list(texts, name)
    if values is None:
        return _text_column(texts, None, count, name)
    joined = _join_texts(values)
    if joined is None:
        values = ["" if value is None else value for value in values]
        joined = _join_texts(values)
        if joined is None:
            raise _no_text(values, name)
    return _text_column(values, joined, count, name)


def _text_column(texts: Any, joined: str | None, count: int, name: str) -> Column:
    """Encode texts with their concatenation, or an Arrow array of texts when `joined` is None."""
    data: memoryview | bytes
    if joined is None:
        sizes, data = _arrow_column(arrow_texts(texts, name))
    else:
        sizes, data = _list_texts(texts, joined, name)
    if len(sizes) != count:
        raise BadMessageError(f"{len(sizes):,} {name} for {count:,} bodies")
    longest = int(np.maximum.reduce(sizes)) if count else 0
    if longest > PROPERTIES_SIZE_MAX:
        raise PropertiesTooLargeError(f"{name} of {longest:,} bytes exceed {PROPERTIES_SIZE_MAX:,}")
    lengths = sizes.astype(_SHORT_LENGTH)
    return Column(lengths, len(data), [lengths.data, data], longest)


def as_list(texts: Texts, name: str) -> Sequence[Any] | None:
    """Texts as a sequence, or None for an Arrow array of texts."""
    if is_arrow(texts):
        return list(texts.to_pylist()) if "list" in arrow_type(texts, name) else None
    if is_array(texts):
        return list(texts.tolist())
    if isinstance(texts, bytes | str) or not isinstance(texts, Sequence):
        kind = type(texts).__name__
        raise BadPropertyError(f"{name} must be a list of texts or an array, not {kind}{list_hint(texts)}")
    return texts


def _no_text(values: Sequence[Any], name: str) -> BadPropertyError:
    row, value = next((row, value) for row, value in enumerate(values) if not isinstance(value, str))
    shown = _value_of(value, row, len(values))
    return BadPropertyError(f"{name}: not all of them are texts: {shown} is of type {type(value).__name__}")


def _value_of(value: object, row: int, count: int) -> str:
    """A wrong value for an error; with the message's place unless there is only one."""
    return f"{repr(value)[:_SHOWN_CHARACTERS]}{f' of message {row:,}' if count > 1 else ''}"


def _join_texts(values: Sequence[Any]) -> str | None:
    """Concatenate texts; None when a value is not a text."""
    try:
        return "".join(values)
    except TypeError:
        return None


def _list_texts(values: Sequence[str], joined: str, name: str) -> tuple[NDArray[Any], bytes]:
    try:
        data = joined.encode()
    except UnicodeEncodeError:
        raise _no_utf8(values, name) from None
    if len(data) == len(joined):
        return _lengths_of(values), data
    return _lengths_of(list(map(str.encode, values))), data  # Not all ASCII: characters are not bytes.


def _no_utf8(values: Sequence[str], name: str) -> BadPropertyError:
    for row, value in enumerate(values):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return BadPropertyError(f"{name}: {_value_of(value, row, len(values))}: {error}")
    raise AssertionError("texts were refused and then accepted")


def _refuse_bytes(column: Column, name: str, forbidden: str) -> None:
    _, values = column.pieces
    data = values if type(values) is bytes else bytes(values)
    for byte in forbidden.encode():
        if byte in data:
            ends = np.cumsum(column.lengths, dtype=np.int64)
            row = int(np.searchsorted(ends, data.index(byte), side="right"))
            value = data[int(ends[row]) - int(column.lengths[row]) : int(ends[row])].decode("utf-8", "replace")
            shown = _value_of(value, row, len(ends))
            raise BadPropertyError(f"{name}: one holds the separator byte 0x{byte:02X}: {shown}")


# Numbers


def numbers(values: Any, dtype: str, count: int, name: str) -> NDArray[Any]:
    """Encode numbers, one per message. Raises BadMessageError."""
    _refuse_masked(values, name)
    try:
        found = np.asarray(values)
        if found.dtype.kind not in "iu" and len(found):
            shown = _first_that(values, lambda value: not is_whole(value))
            raise BadMessageError(f"{name}: {shown}{found.dtype} are no whole numbers")
        limits = np.iinfo(dtype)
        if len(found) and not limits.min <= int(found.min()) <= int(found.max()) <= limits.max:
            shown = _first_that(found, lambda value: not limits.min <= value <= limits.max)
            raise BadMessageError(
                f"{name}: {shown}{int(found.min()):,}…{int(found.max()):,} do not fit {limits.bits} bits"
            )
    except (TypeError, ValueError, OverflowError) as error:
        raise BadMessageError(f"{name}: {error}") from None
    if found.shape != (count,):
        raise BadMessageError(f"{found.shape} {name} for {count:,} bodies")
    return np.ascontiguousarray(found, np.dtype(dtype).newbyteorder("<"))


def _first_that(values: Any, is_wrong: Callable[[Any], bool]) -> str:
    """The first wrong number, for an error; "" when there is no single one."""
    rows = values.to_pylist() if is_arrow(values) else values.tolist() if is_array(values) else list(values)
    for row, value in enumerate(rows):
        if is_wrong(value):
            return f"{_value_of(value, row, len(rows))}: "
    return ""


def queue_numbers(queue_ids: Any, count: int) -> NDArray[np.int32]:
    """Encode queue ids. Raises NoSuchQueueError when one is negative."""
    found = numbers(queue_ids, "i4", count, "queue ids")
    if count and int(found.min()) < 0:
        row = int(found.argmin())
        raise NoSuchQueueError(f"queue id {_value_of(int(found[row]), row, count)} is below 0")
    return found
