"""Write columns of records as the body of an Arrow IPC message, all buffers in one call.

    places ──body_size_max──▶ bytes ──▶ words int64[head + bytes / 8] ──write_columns──▶ head filled in, body written

A batch of all columns has fifty buffers, which would cost some 100 µs in Python in addition to the copies.
`steps` int64[STEP_WORDS × columns] defines the columns:

    KIND    ROW, of the places       DELTA               NULLS
    INT64   position                 distance in bytes
    INT32   position                 distance in bytes
    TIME    position                 distance in bytes   ms as µs; null if outside the range of an i64
    TEXT    position, size in next                       1: an empty text is null
    BYTES   position, size in next
    HOST    position, size in next
    ID
    WORDS   position, size in next                       list of texts
    PAIRS                                                map from text to text
    JSON
    SAME    position in `same`       its size            the same text in each row
    DICTIONARY  position, size in next                   1: an empty text is null

The head is the metadata of the message (`mqproc.arrow.batches`). `write_columns` fills in its words, column by column
in the order of Arrow's IPC format: nodes (length, nulls) and buffers (offset in the body, size). A dictionary column is
written as int32 indices; its distinct texts follow in the body, outside the message's buffers.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mqproc.kernels.hashing import java_hash_utf8
from mqproc.kernels.jit.compile import kernel
from mqproc.kernels.jit.intrinsics import copy_bytes, load_be64, load_u8
from mqproc.kernels.jit.lowering import Bytes, Int32s, Words
from mqproc.kernels.record_decode import (
    HOST_TEXT_MAX,
    PLACE_ROWS,
    PROPERTIES,
    PROPERTIES_SIZE,
    RECORD,
    STORE_HOST,
    STORE_HOST_SIZE,
    copy_int32,
    copy_int64,
    copy_values,
    write_hosts,
)
from mqproc.kernels.record_fields import find_byte, same_bytes
from mqproc.layout import properties, record

# Columns derived from fields: message ids, keys as words, properties as pairs or as JSON.
#
# These kernels take the places of `count` records (record_decode) and write Arrow's layout: offsets int32[n + 1] into
# `data` uint8, and for lists int32[count + 1] into the items. `first` is the position of the offsets in `offsets`,
# `lists` that of the lists' offsets, `begin` the position of offset 0 in `data`. The caller allocates the maximum:
#
#     write_message_ids    ID_TEXT_MAX bytes a record
#     write_words          bytes of the values; `words_max` items
#     write_pairs          bytes of the properties, for names and for values; `pairs_max` items
#     write_json           JSON_GROWTH times the bytes of the properties, and 2 a record
#
# Properties are parsed as in `layout.properties`: pairs without name or value are ignored, the last pair of a name
# wins, and the CRC pair is excluded.


ID_TEXT_MAX = 2 * (record.HOST_V6_SIZE + 8)
JSON_GROWTH = 6
"""A control character is escaped as six bytes."""

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
def write_message_ids(
    buf: Bytes, places: Words, count: int, offsets: Int32s, first: int, data: Bytes, begin: int
) -> int:
    """Write message ids: hexadecimal store host and physical offset; returns their bytes."""
    end = begin
    offsets[first] = 0
    for i in range(count):
        end = _hex_bytes(buf, int(places[STORE_HOST * count + i]), int(places[STORE_HOST_SIZE * count + i]), data, end)
        end = _hex_bytes(buf, int(places[RECORD * count + i]) + record.PHYSICAL_OFFSET, 8, data, end)
        offsets[first + i + 1] = end - begin
    return end - begin


@kernel
def words_max(size: int, count: int) -> int:
    """Maximum number of words, a character and a separator each, in `count` values."""
    return (size + count) // 2


@kernel
def write_words(
    buf: Bytes, places: Words, row: int, count: int, offsets: Int32s, lists: int, first: int, data: Bytes, begin: int
) -> int:
    """Write the words of the values located by `row`; returns their number."""
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
    """Bytes of the name of the pair buf[at:end]; 0 for a pair that is ignored."""
    name_end = find_byte(buf, at, end, _NAME_END)
    size = name_end - at
    if size == 0 or name_end + 1 >= end:
        return 0
    if size == _CRC_NAME_SIZE and same_bytes(buf, at, _CRC_NAME, 0, size):
        return 0
    return size


@kernel
def _is_repeated(buf: Bytes, name: int, size: int, at: int, stop: int) -> bool:
    """Whether buf[at:stop] contains another pair of the same name."""
    while at < stop:
        end = find_byte(buf, at, stop, _PAIR_END)
        if _name_size(buf, at, end) == size and same_bytes(buf, at, buf, name, size):
            return True
        at = end + 1
    return False


@kernel
def pairs_max(size: int, count: int) -> int:
    """Maximum number of pairs: a name, a value and two separators each."""
    return (size + count) // 4


@kernel
def write_pairs(
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
    """Write names and values of the properties; returns the number of pairs."""
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
            if size > 0 and not _is_repeated(buf, at, size, end + 1, stop):
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
    """Write buf[at:stop] as a JSON string at data[end]; returns the end position."""
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
def write_json(buf: Bytes, places: Words, count: int, offsets: Int32s, first: int, data: Bytes, begin: int) -> int:
    """Write the properties as JSON objects; returns the bytes written."""
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
            if size > 0 and not _is_repeated(buf, at, size, end + 1, stop):
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


STEP_WORDS: Final = 4
KIND, ROW, DELTA, NULLS = range(STEP_WORDS)
INT64, INT32, TIME, TEXT, BYTES, HOST, ID, WORDS, PAIRS, JSON, SAME, DICTIONARY = range(12)

HEAD_WORDS: Final = 5
"""Words of `head`, all indices of words: the body, the lengths of batch and body, nodes and buffers."""
BODY_AT, LENGTH_AT, BODY_LENGTH_AT, NODES_AT, BUFFERS_AT = range(HEAD_WORDS)
# Words of `state`: end of the written body in bytes, next node, next buffer.
_END, _NODE, _BUFFER = range(3)
STATE_WORDS: Final = 3
DICTIONARY_WORDS: Final = 3
"""Words of a column's dictionary: number of texts, position in the body of their offsets, and of their bytes."""

_ALIGNED: Final = 64
# Maximum number of buffers of a column; each begins at a multiple of 64 bytes.
_BUFFERS_MAX: Final = 9
_TIME_MS_MAX: Final = (2**63 - 1) // 1000
"""Timestamps are i64 microseconds in Spark and in these batches."""
DATA_MAX: Final = 2**31 - 1
_TOP_BIT: Final = 0x80


@kernel
def _sizes(places: Words, row: int, count: int) -> int:
    total = 0
    for i in range(row * count, (row + 1) * count):
        total += int(places[i])
    return total


@kernel
def _data_size_max(places: Words, count: int, kind: int, row: int, delta: int) -> int:
    """Maximum number of bytes in one buffer of a column's texts."""
    if kind in (TEXT, BYTES, WORDS, DICTIONARY):
        return _sizes(places, row + 1, count)
    if kind == HOST:
        return HOST_TEXT_MAX * count
    if kind == ID:
        return ID_TEXT_MAX * count
    if kind == PAIRS:
        return _sizes(places, PROPERTIES_SIZE, count)
    if kind == JSON:
        return JSON_GROWTH * _sizes(places, PROPERTIES_SIZE, count) + 2 * count
    return delta * count if kind == SAME else 0


@kernel
def body_size_max(places: Words, count: int, steps: Words, columns: int) -> int:
    """Maximum bytes of the body; −1 − n if a text buffer of column n may exceed DATA_MAX."""
    total = 0
    for column in range(columns):
        at = column * STEP_WORDS
        kind = int(steps[at + KIND])
        data = _data_size_max(places, count, kind, int(steps[at + ROW]), int(steps[at + DELTA]))
        if data > DATA_MAX:
            return -1 - column
        total += _BUFFERS_MAX * _ALIGNED + (count + 7) // 8
        if kind in (INT64, TIME):
            total += 8 * count
        elif kind == INT32:
            total += 4 * count
        else:
            total += 4 * (count + 1) + data
        if kind == DICTIONARY:
            total += 4 * count
        if kind == WORDS:
            total += 4 * (words_max(data, count) + 1)
        if kind == PAIRS:
            total += 8 * (pairs_max(data, count) + 1) + data
    return total


@kernel
def _fill_in(words: Words, state: Words, of: int, first: int, second: int) -> None:
    """Fill in the next node (`of` _NODE: length, nulls) or buffer (_BUFFER: offset, size)."""
    at = int(state[of])
    words[at] = first
    words[at + 1] = second
    state[of] = at + 2


@kernel
def _allocate(state: Words, size: int) -> int:
    """Allocate an aligned buffer in the body; returns its offset."""
    offset = int(state[_END])
    state[_END] = (offset + size + _ALIGNED - 1) // _ALIGNED * _ALIGNED
    return offset


@kernel
def _beyond_ascii(data: Bytes, begin: int, size: int) -> int:
    bits = 0
    for i in range(begin, begin + size):
        bits |= load_u8(data, i)
    return 1 if bits & _TOP_BIT else 0


@kernel
def _write_times(
    buf: Bytes, places: Words, row: int, delta: int, words: Words, first: int, count: int, valid: Bytes, bits: int
) -> int:
    """Write ms as µs; returns the number of values out of range, whose `valid` bits are 0."""
    nulls = 0
    for i in range(count):
        ms = load_be64(buf, int(places[row * count + i]) + delta)
        fits = -_TIME_MS_MAX <= ms <= _TIME_MS_MAX
        words[first + i] = ms * 1000 if fits else 0
        nulls += 0 if fits else 1
    if nulls:
        _clear(valid, bits, count)
        for i in range(count):
            ms = load_be64(buf, int(places[row * count + i]) + delta)
            if -_TIME_MS_MAX <= ms <= _TIME_MS_MAX:
                _set_bit(valid, bits, i)
    return nulls


@kernel
def _clear(data: Bytes, begin: int, count: int) -> None:
    for i in range(begin, begin + (count + 7) // 8):
        data[i] = 0


@kernel
def _set_bit(data: Bytes, begin: int, i: int) -> None:
    data[begin + (i >> 3)] = load_u8(data, begin + (i >> 3)) | 1 << (i & 7)


@kernel
def _valid_sizes(places: Words, row: int, count: int, valid: Bytes, bits: int) -> int:
    """Clear the validity bits of empty values, if there are any; returns their number."""
    nulls = 0
    for i in range(count):
        nulls += 1 if int(places[row * count + i]) == 0 else 0
    if nulls:
        _clear(valid, bits, count)
        for i in range(count):
            if int(places[row * count + i]) != 0:
                _set_bit(valid, bits, i)
    return nulls


@kernel
def _write_same(
    same: Bytes, at: int, size: int, count: int, offsets: Int32s, first: int, data: Bytes, begin: int
) -> int:
    for i in range(count):
        offsets[first + i] = i * size
        copy_bytes(data, begin + i * size, same, at, size)
    offsets[first + count] = count * size
    return count * size


@kernel
def table_words(count: int) -> int:
    """Size of `table` for `count` rows: slots, at least 2 × count, and a row for each text."""
    slots = 4
    while slots < 2 * count:
        slots *= 2
    return slots + count


@kernel
def _index_texts(
    buf: Bytes, places: Words, row: int, count: int, nulls: int, indices: Int32s, first: int, table: Int32s
) -> int:
    """Write the index of each row's text among the distinct ones; returns their number.

    table[slots + n] receives the row of distinct text n. With `nulls` empty texts get index 0.
    """
    slots = table.size - count
    for i in range(slots):
        table[i] = 0
    distinct = 0
    at_before, size_before, index = 0, -1, 0
    for i in range(count):
        at, size = int(places[row * count + i]), int(places[(row + 1) * count + i])
        if nulls and size == 0:
            indices[first + i] = 0
            continue
        if size != size_before or not same_bytes(buf, at, buf, at_before, size):
            slot = java_hash_utf8(buf, at, at + size, 0) & slots - 1
            index = int(table[slot]) - 1
            while index >= 0:
                other = int(table[slots + index])
                if int(places[(row + 1) * count + other]) == size and same_bytes(
                    buf, at, buf, int(places[row * count + other]), size
                ):
                    break
                slot = slot + 1 & slots - 1
                index = int(table[slot]) - 1
            if index < 0:
                index = distinct
                table[slots + index] = i
                distinct += 1
                table[slot] = distinct
            at_before, size_before = at, size
        indices[first + i] = index
    return distinct


@kernel
def _dictionary(
    buf: Bytes,
    places: Words,
    count: int,
    row: int,
    nullable: int,
    body: int,
    data: Bytes,
    offsets: Int32s,
    words: Words,
    state: Words,
    table: Int32s,
    dictionary: Words,
    at: int,
) -> int:
    """Write a column of indices and its distinct texts; returns 1 for bytes beyond ASCII."""
    nulls, bits = 0, 0
    if nullable:
        bits = _allocate(state, (count + 7) // 8)
        nulls = _valid_sizes(places, row + 1, count, data, body + bits)
    _fill_in(words, state, _NODE, count, nulls)
    _fill_in(words, state, _BUFFER, bits, (count + 7) // 8 if nulls else 0)
    indices = _allocate(state, 4 * count)
    _fill_in(words, state, _BUFFER, indices, 4 * count)
    distinct = _index_texts(buf, places, row, count, nulls, offsets, (body + indices) // 4, table)
    ends = _allocate(state, 4 * (distinct + 1))
    texts = _allocate(state, 0)
    first, begin = (body + ends) // 4, body + texts
    slots = table.size - count
    size = 0
    offsets[first] = 0
    for n in range(distinct):
        i = int(table[slots + n])
        length = int(places[(row + 1) * count + i])
        copy_bytes(data, begin + size, buf, int(places[row * count + i]), length)
        size += length
        offsets[first + n + 1] = size
    _allocate(state, size)
    dictionary[at], dictionary[at + 1], dictionary[at + 2] = distinct, ends, texts
    return _beyond_ascii(data, begin, size)


@kernel
def _text(
    buf: Bytes,
    places: Words,
    count: int,
    step: Words,
    at: int,
    same: Bytes,
    body: int,
    data: Bytes,
    offsets: Int32s,
    words: Words,
    state: Words,
) -> int:
    """Write a column of texts or bytes; returns 1 if it contains bytes beyond ASCII."""
    kind, row, delta = int(step[at + KIND]), int(step[at + ROW]), int(step[at + DELTA])
    nulls, bits = 0, 0
    if step[at + NULLS] != 0:
        bits = _allocate(state, (count + 7) // 8)
        nulls = _valid_sizes(places, row + 1, count, data, body + bits)
    _fill_in(words, state, _NODE, count, nulls)
    _fill_in(words, state, _BUFFER, bits, (count + 7) // 8 if nulls else 0)
    ends = _allocate(state, 4 * (count + 1))
    first = (body + ends) // 4
    _fill_in(words, state, _BUFFER, ends, 4 * (count + 1))
    texts = _allocate(state, 0)
    begin = body + texts
    if kind in (TEXT, BYTES):
        size = copy_values(buf, places, row, count, offsets, first, data, begin)
    elif kind == HOST:
        size = write_hosts(buf, places, row, count, offsets, first, data, begin)
    elif kind == ID:
        size = write_message_ids(buf, places, count, offsets, first, data, begin)
    elif kind == JSON:
        size = write_json(buf, places, count, offsets, first, data, begin)
    else:
        size = _write_same(same, row, delta, count, offsets, first, data, begin)
    _allocate(state, size)
    _fill_in(words, state, _BUFFER, texts, size)
    return _beyond_ascii(data, begin, size) if kind != BYTES else 0


@kernel
def _words(
    buf: Bytes, places: Words, count: int, row: int, body: int, data: Bytes, offsets: Int32s, words: Words, state: Words
) -> int:
    """Write a column of lists of words; returns 1 if it contains bytes beyond ASCII."""
    size = _sizes(places, row + 1, count)
    lists = _allocate(state, 4 * (count + 1))
    ends = _allocate(state, 4 * (words_max(size, count) + 1))
    texts = _allocate(state, size)
    first, begin = (body + ends) // 4, body + texts
    found = write_words(buf, places, row, count, offsets, (body + lists) // 4, first, data, begin)
    _fill_in(words, state, _NODE, count, 0)
    _fill_in(words, state, _BUFFER, 0, 0)
    _fill_in(words, state, _BUFFER, lists, 4 * (count + 1))
    return _items(found, ends, texts, first, begin, data, offsets, words, state)


@kernel
def _items(
    found: int, ends: int, texts: int, first: int, begin: int, data: Bytes, offsets: Int32s, words: Words, state: Words
) -> int:
    """Fill in node and buffers of the items of lists; returns 1 for bytes beyond ASCII."""
    size = int(offsets[first + found])
    _fill_in(words, state, _NODE, found, 0)
    _fill_in(words, state, _BUFFER, 0, 0)
    _fill_in(words, state, _BUFFER, ends, 4 * (found + 1))
    _fill_in(words, state, _BUFFER, texts, size)
    return _beyond_ascii(data, begin, size)


@kernel
def _pairs(
    buf: Bytes, places: Words, count: int, body: int, data: Bytes, offsets: Int32s, words: Words, state: Words
) -> int:
    """Write a column of maps; returns 1 if it contains bytes beyond ASCII."""
    size = _sizes(places, PROPERTIES_SIZE, count)
    ends_size = 4 * (pairs_max(size, count) + 1)
    lists = _allocate(state, 4 * (count + 1))
    name_ends, names = _allocate(state, ends_size), _allocate(state, size)
    value_ends, values = _allocate(state, ends_size), _allocate(state, size)
    names_first, values_first = (body + name_ends) // 4, (body + value_ends) // 4
    found = write_pairs(
        buf, places, count, offsets, (body + lists) // 4, names_first, values_first, data, body + names, body + values
    )
    _fill_in(words, state, _NODE, count, 0)
    _fill_in(words, state, _BUFFER, 0, 0)
    _fill_in(words, state, _BUFFER, lists, 4 * (count + 1))
    _fill_in(words, state, _NODE, found, 0)
    _fill_in(words, state, _BUFFER, 0, 0)
    beyond = _items(found, name_ends, names, names_first, body + names, data, offsets, words, state)
    return beyond | _items(found, value_ends, values, values_first, body + values, data, offsets, words, state)


@kernel
def write_columns(
    buf: Bytes,
    places: Words,
    count: int,
    steps: Words,
    columns: int,
    same: Bytes,
    head: Words,
    data: Bytes,
    offsets: Int32s,
    words: Words,
    state: Words,
    table: Int32s,
    dictionaries: Words,
) -> int:
    """Write the columns of `count` records.

    Bit n of the result is set if texts of column n have bytes beyond ASCII. `data`, `offsets` and `words` are the
    message's memory as bytes, i32 and i64; `head` int64[HEAD_WORDS] locates its parts in `words`; `state`
    int64[STATE_WORDS] and `table` int32[table_words(count)] are scratch; `dictionaries` int64[DICTIONARY_WORDS ×
    columns] receives those of dictionary columns. At most 63 columns.
    """
    body = 8 * int(head[BODY_AT])
    state[_END] = 0
    state[_NODE] = head[NODES_AT]
    state[_BUFFER] = head[BUFFERS_AT]
    beyond = 0
    for column in range(columns):
        at = column * STEP_WORDS
        kind, row, delta = int(steps[at + KIND]), int(steps[at + ROW]), int(steps[at + DELTA])
        if kind == WORDS:
            beyond |= _words(buf, places, count, row, body, data, offsets, words, state) << column
        elif kind == PAIRS:
            beyond |= _pairs(buf, places, count, body, data, offsets, words, state) << column
        elif kind == DICTIONARY:
            nullable, found = int(steps[at + NULLS]), column * DICTIONARY_WORDS
            text = _dictionary(
                buf, places, count, row, nullable, body, data, offsets, words, state, table, dictionaries, found
            )
            beyond |= text << column
        elif kind > TIME:
            text = _text(buf, places, count, steps, at, same, body, data, offsets, words, state)
            beyond |= text << column
        else:
            nulls, bits = 0, 0
            width = 4 if kind == INT32 else 8
            if kind == TIME:
                bits = _allocate(state, (count + 7) // 8)
            values = _allocate(state, width * count)
            first = (body + values) // width
            if kind == TIME:
                nulls = _write_times(buf, places, row, delta, words, first, count, data, body + bits)
            elif kind == INT64:
                copy_int64(buf, places, row, delta, words, first, count)
            else:
                copy_int32(buf, places, row, delta, offsets, first, count)
            _fill_in(words, state, _NODE, count, nulls)
            _fill_in(words, state, _BUFFER, bits, (count + 7) // 8 if nulls else 0)
            _fill_in(words, state, _BUFFER, values, width * count)
    words[int(head[LENGTH_AT])] = count
    words[int(head[BODY_LENGTH_AT])] = state[_END]
    return beyond


def warm() -> None:
    """Compile or load these kernels."""
    nothing = np.zeros(0, np.uint8)
    places = np.zeros(PLACE_ROWS, np.int64)
    offsets = np.zeros(1, np.int32)
    words_max(0, 0)
    pairs_max(0, 0)
    write_message_ids(nothing, places, 0, offsets, 0, nothing, 0)
    write_words(nothing, places, 0, 0, offsets, 0, 0, nothing, 0)
    write_pairs(nothing, places, 0, offsets, 0, 0, 0, nothing, 0, 0)
    write_json(nothing, places, 0, offsets, 0, nothing, 0)
    words = np.zeros(HEAD_WORDS, np.int64)
    body_size_max(places, 0, words, 0)
    state = np.zeros(STATE_WORDS, np.int64)
    table_words(0)
    write_columns(nothing, places, 0, words, 0, nothing, words, nothing, offsets, words, state, offsets, words)
