"""Columns that a record does not hold as they are: message ids, keys as words, properties as pairs or as JSON.

All take the places that `kernels.decode` makes of `count` records and write Arrow's layout: offsets int32[n + 1] into
`data` uint8, and for lists int32[count + 1] into the items. `first` is where offsets begin in `offsets`, `lists` where
those of lists do, `begin` where offset 0 lies in `data`. Whoever calls brings room for the longest result:

    take_message_ids    ID_TEXT_MAX bytes a record
    take_words          the value's bytes; `words_max` items
    take_pairs          the properties' bytes, for names and for values; `pairs_max` items
    take_json           JSON_GROWTH times the properties' bytes, and 2 a record

Properties are read as `layout.properties` does: pairs without name or value fall out, the last of a name wins, the
CRC pair belongs to the record.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels.decode import PROPERTIES, PROPERTIES_SIZE, RECORD, STORE_HOST, STORE_HOST_SIZE
from mqproc.kernels.fields import find_byte
from mqproc.kernels.intrinsics import copy_bytes, load_u8
from mqproc.kernels.jit import kernel
from mqproc.kernels.primitive import Bytes, Words
from mqproc.kernels.queue_lookup import same_bytes
from mqproc.layout import properties, record

Int32s = NDArray[np.int32]

ID_TEXT_MAX = 2 * (record.HOST_V6_SIZE + 8)
JSON_GROWTH = 6
"""A control character becomes six."""

_NAME_END = ord(properties.NAME_END)
_PAIR_END = ord(properties.PAIR_END)
_SPACE = ord(properties.KEY_SEPARATOR)
_CRC_NAME = np.frombuffer(properties.CRC32.encode(), np.uint8).copy()
_CRC_NAME_SIZE = len(properties.CRC32)
_ZERO, _LARGE_A, _SMALL_A, _SMALL_U = (ord(character) for character in "0Aau")
_QUOTE, _BACKSLASH, _OPEN, _CLOSE, _COLON, _COMMA = (ord(character) for character in '"\\{}:,')
_FIRST_PRINTABLE = 0x20


@kernel
def _hex_digit(value: int, letter: int) -> int:
    return _ZERO + value if value < 10 else letter - 10 + value


@kernel
def _hex_bytes(buf: Bytes, at: int, size: int, data: Bytes, end: int) -> int:
    for place in range(size):
        byte = load_u8(buf, at + place)
        data[end] = _hex_digit(byte >> 4, _LARGE_A)
        data[end + 1] = _hex_digit(byte & 15, _LARGE_A)
        end += 2
    return end


@kernel
def take_message_ids(
    buf: Bytes, places: Words, count: int, offsets: Int32s, first: int, data: Bytes, begin: int
) -> int:
    """RocketMQ's offset message ids: store host and physical offset in hexadecimal; returns the bytes."""
    end = begin
    offsets[first] = 0
    for i in range(count):
        end = _hex_bytes(buf, int(places[STORE_HOST * count + i]), int(places[STORE_HOST_SIZE * count + i]), data, end)
        end = _hex_bytes(buf, int(places[RECORD * count + i]) + record.PHYSICAL_OFFSET, 8, data, end)
        offsets[first + i + 1] = end - begin
    return end - begin


@kernel
def words_max(size: int, count: int) -> int:
    """How many words `count` values of together `size` bytes may have: each has a character and one behind it."""
    return (size + count) // 2


@kernel
def take_words(
    buf: Bytes, places: Words, row: int, count: int, offsets: Int32s, lists: int, first: int, data: Bytes, begin: int
) -> int:
    """The words of the value at `row`, whose size is in the row behind it; returns how many there are."""
    words = 0
    end = 0
    offsets[lists] = 0
    offsets[first] = 0
    for i in range(count):
        at = int(places[row * count + i])
        stop = at + int(places[(row + 1) * count + i])
        while at < stop:
            word_end = find_byte(buf, at, stop, _SPACE)
            if word_end > at:
                copy_bytes(data, begin + end, buf, at, word_end - at)
                end += word_end - at
                words += 1
                offsets[first + words] = end
            at = word_end + 1
        offsets[lists + i + 1] = words
    return words


@kernel
def _name_size(buf: Bytes, at: int, end: int) -> int:
    """Bytes of the name of the pair buf[at:end]; 0 for one that counts for nothing."""
    name_end = find_byte(buf, at, end, _NAME_END)
    size = name_end - at
    if size == 0 or name_end + 1 >= end:
        return 0
    if size == _CRC_NAME_SIZE and same_bytes(buf, at, _CRC_NAME, 0, size):
        return 0
    return size


@kernel
def _comes_again(buf: Bytes, name: int, size: int, at: int, stop: int) -> bool:
    """Whether a pair of the same name lies in buf[at:stop]."""
    while at < stop:
        end = find_byte(buf, at, stop, _PAIR_END)
        if _name_size(buf, at, end) == size and same_bytes(buf, at, buf, name, size):
            return True
        at = end + 1
    return False


@kernel
def pairs_max(size: int, count: int) -> int:
    """How many pairs `count` records' properties of together `size` bytes may have: name, value and two separators."""
    return (size + count) // 4


@kernel
def take_pairs(
    buf: Bytes,
    places: Words,
    count: int,
    offsets: Int32s,
    lists: int,
    names_first: int,
    values_first: int,
    data: Bytes,
    names_begin: int,
    values_begin: int,
) -> int:
    """Names and values of the properties; returns how many pairs there are."""
    pairs = 0
    names_end = 0
    values_end = 0
    offsets[lists] = 0
    offsets[names_first] = 0
    offsets[values_first] = 0
    for i in range(count):
        at = int(places[PROPERTIES * count + i])
        stop = at + int(places[PROPERTIES_SIZE * count + i])
        while at < stop:
            end = find_byte(buf, at, stop, _PAIR_END)
            size = _name_size(buf, at, end)
            if size > 0 and not _comes_again(buf, at, size, end + 1, stop):
                copy_bytes(data, names_begin + names_end, buf, at, size)
                names_end += size
                value_size = end - at - size - 1
                copy_bytes(data, values_begin + values_end, buf, at + size + 1, value_size)
                values_end += value_size
                pairs += 1
                offsets[names_first + pairs] = names_end
                offsets[values_first + pairs] = values_end
            at = end + 1
        offsets[lists + i + 1] = pairs
    return pairs


@kernel
def _json_text(buf: Bytes, at: int, stop: int, data: Bytes, end: int) -> int:
    """buf[at:stop] as a JSON string at data[end]; returns the position behind it."""
    data[end] = _QUOTE
    end += 1
    for place in range(at, stop):
        byte = load_u8(buf, place)
        if byte in (_QUOTE, _BACKSLASH):
            data[end] = _BACKSLASH
            data[end + 1] = byte
            end += 2
        elif byte < _FIRST_PRINTABLE:
            data[end] = _BACKSLASH
            data[end + 1] = _SMALL_U
            data[end + 2] = _ZERO
            data[end + 3] = _ZERO
            data[end + 4] = _hex_digit(byte >> 4, _SMALL_A)
            data[end + 5] = _hex_digit(byte & 15, _SMALL_A)
            end += 6
        else:
            data[end] = byte
            end += 1
    data[end] = _QUOTE
    return end + 1


@kernel
def take_json(buf: Bytes, places: Words, count: int, offsets: Int32s, first: int, data: Bytes, begin: int) -> int:
    """The properties as JSON objects; returns the bytes."""
    written = begin
    offsets[first] = 0
    for i in range(count):
        at = int(places[PROPERTIES * count + i])
        stop = at + int(places[PROPERTIES_SIZE * count + i])
        data[written] = _OPEN
        written += 1
        alone = True
        while at < stop:
            end = find_byte(buf, at, stop, _PAIR_END)
            size = _name_size(buf, at, end)
            if size > 0 and not _comes_again(buf, at, size, end + 1, stop):
                if not alone:
                    data[written] = _COMMA
                    written += 1
                alone = False
                written = _json_text(buf, at, at + size, data, written)
                data[written] = _COLON
                written = _json_text(buf, at + size + 1, end, data, written + 1)
            at = end + 1
        data[written] = _CLOSE
        written += 1
        offsets[first + i + 1] = written - begin
    return written - begin


def warm() -> None:
    """Compile or load these kernels."""
    nothing = np.zeros(0, np.uint8)
    places = np.zeros(0, np.int64)
    offsets = np.zeros(1, np.int32)
    words_max(0, 0)
    pairs_max(0, 0)
    take_message_ids(nothing, places, 0, offsets, 0, nothing, 0)
    take_words(nothing, places, 0, 0, offsets, 0, 0, nothing, 0)
    take_pairs(nothing, places, 0, offsets, 0, 0, 0, nothing, 0, 0)
    take_json(nothing, places, 0, offsets, 0, nothing, 0)
