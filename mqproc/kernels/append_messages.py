"""Check an array of messages in MessagePack, and write it as the columns of an append frame.

    MessagePack ──check_messages──▶ counts and sizes ──write_columns──▶ columns ──check_frame──▶ …

Each message is an array of the fields of `Message` (mqproc/types.py), in their order. Body, tag, keys, queue id, flag,
born time and sharding key become columns; a message of another topic, or with another field given, is refused.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.append_run import big_endian
from mqproc.kernels.jit.compile import inlined, kernel
from mqproc.kernels.jit.intrinsics import copy_bytes, load_le64, load_u8, store_le16, store_le32, store_le64
from mqproc.kernels.jit.lowering import Bytes, Words

FIELDS = 12
"""Number of fields of Message, in their order; a test compares the names."""
TOPIC, BODY, TAG, KEYS, PROPERTIES, QUEUE_ID, FLAG, BORN, UNIQUE_ID, DELAY_LEVEL, DELIVER_AT, SHARDING_KEY = range(
    FIELDS
)
# Results of `check_messages`: MESSAGES_OK, or ANY_FIELD + the number of the refused field.
MESSAGES_OK, NO_ARRAY, TRAILING_BYTES, MIXED_QUEUES, ANY_FIELD = range(5)

# Indices into the words that `check_messages` fills. Sizes of columns in bytes; −1 = no such column.
(
    BODIES_SIZE,
    KEYS_SIZE,
    TAGS_SIZE,
    SHARDING_SIZE,
    QUEUES_GIVEN,  # number of messages with a queue id: none or all
    FLAGS_GIVEN,
    BORN_GIVEN,
    COLUMNS_SIZE,  # of all columns together
    FAILED_MESSAGE,
) = range(9)
FOUND_WORDS = 9

_NONE, _NUMBER, _TEXT, _BYTES, _ARRAY, _MAP, _INVALID = range(7)
_NIL = 0xC0
_BYTES8, _UINT8, _INT8, _TEXT8, _ARRAY16 = 0xC4, 0xCC, 0xD0, 0xD9, 0xDC
_LENGTH16_MAX = 0xFFFF
_NUMBER32_MAX = 0x7FFF_FFFF
_SPACE = 0x20
# The fields from PROPERTIES on of most messages: not given.
_DEFAULTS = int.from_bytes(b"\x80\xc0\x00\xc0\xa0\x00\x00\xa0", "little", signed=True)
assert FIELDS - PROPERTIES == 8


@inlined
def _item(payload: Bytes, at: int, end: int) -> tuple[int, int, int]:
    """Parse the head of the item at `at`: kind, position after the head, value or length.

    The bytes of a text lie within [at, end), or the item is invalid. Extensions, floats and booleans are.
    """
    if at >= end:
        return _INVALID, at, 0
    first = load_u8(payload, at)
    if first < 0x80:
        return _NUMBER, at + 1, first
    if first >= 0xE0:
        return _NUMBER, at + 1, first - 0x100
    kind, width, signed, value = _INVALID, 0, 0, 0
    if first < 0xA0:
        kind, value = _MAP if first < 0x90 else _ARRAY, first & 0x0F
    elif first < 0xC0:
        kind, value = _TEXT, first & 0x1F
    elif first == _NIL:
        kind = _NONE
    elif _BYTES8 <= first < _BYTES8 + 3:
        kind, width = _BYTES, 1 << (first - _BYTES8)
    elif _UINT8 <= first < _UINT8 + 4:
        kind, width = _NUMBER, 1 << (first - _UINT8)
    elif _INT8 <= first < _INT8 + 4:
        kind, width, signed = _NUMBER, 1 << (first - _INT8), 1
    elif _TEXT8 <= first < _TEXT8 + 3:
        kind, width = _TEXT, 1 << (first - _TEXT8)
    elif _ARRAY16 <= first < _ARRAY16 + 2:
        kind, width = _ARRAY, 2 << (first - _ARRAY16)
    at += 1
    if width > end - at:
        return _INVALID, at, 0
    if width > 0:
        value = big_endian(payload, at, width, signed)
        at += width
    is_unsigned_above = width == 8 and signed == 0 and value < 0
    is_outside = kind in (_TEXT, _BYTES) and value > end - at
    if is_unsigned_above or is_outside:
        kind = _INVALID
    return kind, at, value


@inlined
def _equal(payload: Bytes, at: int, text: Bytes, size: int) -> bool:
    different = 0
    for place in range(size):
        different |= load_u8(payload, at + place) ^ load_u8(text, place)
    return different == 0


@inlined
def _has_defaults(payload: Bytes, at: int, end: int) -> bool:
    """Whether no field from PROPERTIES on is given, in the shortest form."""
    return at + FIELDS - PROPERTIES <= end and load_le64(payload, at) == _DEFAULTS


@inlined
def _has_space(payload: Bytes, at: int, size: int) -> bool:
    found = 0
    for place in range(size):
        found |= int(load_u8(payload, at + place) == _SPACE)
    return found != 0


@kernel
def check_messages(payload: Bytes, size: int, count: int, topic: Bytes, topic_size: int, found: Words) -> int:
    """Check that `payload[:size]` is an array of `count` messages of a topic.

    Returns MESSAGES_OK or the first violation. `payload` and `topic` uint8, `found` int64[FOUND_WORDS]. A message is
    refused unless its fields fit the columns: no properties, unique id or delay, keys without spaces, numbers of their
    width, no sharding key beside a queue id.
    """
    bodies, keys, tags, sharding_keys = 0, 0, 0, 0
    queues, flags, born = 0, 0, 0
    found[FAILED_MESSAGE] = 0
    kind, at, items = _item(payload, 0, size)
    if kind != _ARRAY or items != count:
        return NO_ARRAY
    for message in range(count):
        found[FAILED_MESSAGE] = message
        kind, at, items = _item(payload, at, size)
        if kind != _ARRAY or items != FIELDS:
            return NO_ARRAY
        for field in range(FIELDS):
            if field == PROPERTIES and _has_defaults(payload, at, size):
                at += FIELDS - PROPERTIES
                break
            kind, at, value = _item(payload, at, size)
            fits = False
            if field == KEYS:
                # Each key is followed by a space except the last.
                joined = -1 if value > 0 else 0
                fits = kind == _ARRAY
                for _key in range(value if fits else 0):
                    kind, at, key_size = _item(payload, at, size)
                    fits = kind == _TEXT and key_size > 0
                    if not fits or _has_space(payload, at, key_size):
                        return ANY_FIELD + KEYS
                    at += key_size
                    joined += key_size + 1
                fits = fits and joined <= _LENGTH16_MAX
                keys += joined
            elif kind == _TEXT:
                if field == TOPIC:
                    fits = value == topic_size and _equal(payload, at, topic, topic_size)
                elif field == TAG:
                    fits = value <= _LENGTH16_MAX
                    tags += value
                elif field == SHARDING_KEY:
                    fits = value <= _LENGTH16_MAX
                    sharding_keys += value
                else:
                    fits = field == UNIQUE_ID and value == 0
                at += value
            elif kind == _BYTES:
                fits = field == BODY
                bodies += value
                at += value
            elif kind == _NUMBER:
                if field == QUEUE_ID:
                    fits = 0 <= value <= _NUMBER32_MAX
                    queues += 1
                elif field == FLAG:
                    fits = -_NUMBER32_MAX - 1 <= value <= _NUMBER32_MAX
                    flags += int(value != 0)
                elif field == BORN:
                    fits = True
                    born += 1
                else:
                    fits = value == 0 and field in (DELAY_LEVEL, DELIVER_AT)
            elif kind == _NONE:
                fits = field in (QUEUE_ID, BORN)
            else:
                fits = kind == _MAP and field == PROPERTIES and value == 0
            if not fits:
                return ANY_FIELD + field
    if at != size:
        return TRAILING_BYTES
    if queues != 0 and (queues != count or sharding_keys != 0):
        return MIXED_QUEUES
    found[BODIES_SIZE] = bodies
    found[KEYS_SIZE] = keys if keys > 0 else -1
    found[TAGS_SIZE] = tags if tags > 0 else -1
    found[SHARDING_SIZE] = sharding_keys if sharding_keys > 0 else -1
    found[QUEUES_GIVEN] = queues
    found[FLAGS_GIVEN] = flags
    found[BORN_GIVEN] = born
    texts = int(keys > 0) + int(tags > 0) + int(sharding_keys > 0)
    numbers = 4 * int(queues > 0) + 4 * int(flags > 0) + 8 * int(born > 0)
    found[COLUMNS_SIZE] = bodies + keys + tags + sharding_keys + count * (4 + 2 * texts + numbers)
    return MESSAGES_OK


@kernel
def write_columns(payload: Bytes, size: int, count: int, born_timestamp_ms: int, found: Words, columns: Bytes) -> None:
    """Write messages that `check_messages` has accepted as the columns of an append frame.

    `columns` uint8[COLUMNS_SIZE]. `born_timestamp_ms` is used for messages without a born time.
    """
    has_keys, has_tags, has_sharding = found[KEYS_SIZE] > 0, found[TAGS_SIZE] > 0, found[SHARDING_SIZE] > 0
    has_queues, has_flags, has_born = found[QUEUES_GIVEN] > 0, found[FLAGS_GIVEN] > 0, found[BORN_GIVEN] > 0
    body_to = 4 * count
    key_lengths = body_to + int(found[BODIES_SIZE])
    key_to = key_lengths + 2 * count
    tag_lengths = key_to + int(found[KEYS_SIZE]) if has_keys else key_lengths
    tag_to = tag_lengths + 2 * count
    born_to = tag_to + int(found[TAGS_SIZE]) if has_tags else tag_lengths
    queue_to = born_to + 8 * count if has_born else born_to
    flag_to = queue_to + 4 * count if has_queues else queue_to
    sharding_lengths = flag_to + 4 * count if has_flags else flag_to
    sharding_to = sharding_lengths + 2 * count
    are_plain = not (has_queues or has_flags or has_born or has_sharding)
    _, at, _ = _item(payload, 0, size)
    for message in range(count):
        _, at, _ = _item(payload, at, size)
        for field in range(FIELDS):
            if field == PROPERTIES and are_plain and _has_defaults(payload, at, size):
                at += FIELDS - PROPERTIES
                break
            kind, at, value = _item(payload, at, size)
            if field == BODY:
                store_le32(columns, 4 * message, value)
                copy_bytes(columns, body_to, payload, at, value)
                body_to += value
            elif field == TAG and has_tags:
                store_le16(columns, tag_lengths + 2 * message, value)
                copy_bytes(columns, tag_to, payload, at, value)
                tag_to += value
            elif field == KEYS:
                first = key_to
                for key in range(value):
                    _, at, key_size = _item(payload, at, size)
                    if key > 0:
                        columns[key_to] = _SPACE
                        key_to += 1
                    copy_bytes(columns, key_to, payload, at, key_size)
                    key_to += key_size
                    at += key_size
                if has_keys:
                    store_le16(columns, key_lengths + 2 * message, key_to - first)
            elif field == QUEUE_ID and has_queues:
                store_le32(columns, queue_to + 4 * message, value)
            elif field == FLAG and has_flags:
                store_le32(columns, flag_to + 4 * message, value)
            elif field == BORN and has_born:
                store_le64(columns, born_to + 8 * message, value if kind == _NUMBER else born_timestamp_ms)
            elif field == SHARDING_KEY and has_sharding:
                store_le16(columns, sharding_lengths + 2 * message, value)
                copy_bytes(columns, sharding_to, payload, at, value)
                sharding_to += value
            if kind in (_TEXT, _BYTES):
                at += value


def warm() -> None:
    """Compile or load these kernels."""
    nothing, found = np.zeros(1, np.uint8), np.zeros(FOUND_WORDS, np.int64)
    check_messages(nothing, 0, 0, nothing, 0, found)
    write_columns(np.full(1, 0x90, np.uint8), 1, 0, 0, found, nothing)
