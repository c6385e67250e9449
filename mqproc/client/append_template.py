"""Templates of append frames, which encode most single messages in few steps.

Messages of one topic, tag and queue without further properties differ in body, key, unique id and time. The constant
parts are encoded once, when the second such message is sent, and each send fills in the rest. Messages that are larger,
or have other fields or types, take the general path in `encoding`.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Final

import msgspec

from mqproc.client.encoding import AppendFrame, encode_message
from mqproc.client.unique_id import PREFIX_CHARACTERS, reserve
from mqproc.layout.properties import KEY_SEPARATOR, NAME_END, PAIR_END
from mqproc.types import Message
from mqproc.wire.codec import encoded
from mqproc.wire.operations.log import COLUMN_ABSENT, QUEUE_ANY, AppendRequest

# Limits of sizes: bodies are joined with the rest, and keys and tags of so many characters certainly fit.
_BODY_BYTES_MAX: Final = 8 << 10
_KEY_MAX: Final = 1024
_TAG_MAX: Final = 64
_TEMPLATES_MAX: Final = 4096

# Default values of a message by identity: an equal value may have another type.
_ZERO: Final = 0
_NO_TEXT: Final = ""

# msgpack types of the variable options: always the widest, so that a template has a fixed length.
_UINT16, _UINT32, _INT32, _UINT64, _TEXT28 = b"\xcd", b"\xce", b"\xd2", b"\xcf", b"\xbc"
_FIELDS: Final = AppendRequest.__struct_fields__
_SIZES_AT: Final = _FIELDS.index("bodies_bytes")
_OWN_AT: Final = _FIELDS.index("unique_prefix")
assert _FIELDS[_SIZES_AT : _SIZES_AT + 2] == ("bodies_bytes", "keys_bytes")
assert _FIELDS[_OWN_AT : _OWN_AT + 3] == ("unique_prefix", "unique_counter", "born_timestamp_ms")
_ARRAY_BYTES: Final = 3  # header of an array of 16 items or more
assert len(_FIELDS) >= 16

_pack_length = struct.Struct("<I").pack
_pack_short_length = struct.Struct("<H").pack

_TemplateKey = tuple[str, str, int | None]  # topic, tag and queue
# A packer, and the constant options before, between and after the variable ones.
_Template = tuple[Callable[..., bytes], bytes, bytes, bytes]
_templates: dict[_TemplateKey, _Template | None] = {}  # None: seen once, as many are


def encode_single(message: Message, *, wait: bool = True) -> AppendFrame:
    """Encode one message; equal to `encode_message`."""
    topic, tag, queue_id, properties = message.topic, message.tag, message.queue_id, message.properties
    if (
        type(topic) is not str
        or type(tag) is not str
        or (queue_id is not None and type(queue_id) is not int)
        or type(properties) is not dict
        or properties
        or message.flag is not _ZERO
        or message.born_timestamp_ms is not None
        or message.unique_id is not _NO_TEXT
        or message.delay_level is not _ZERO
        or message.deliver_at_ms is not _ZERO
        or message.sharding_key is not _NO_TEXT
        or wait is not True
    ):
        return encode_message(message, wait=wait)
    template_key = topic, tag, queue_id
    template = _templates.get(template_key)
    if template is not None:
        frame = _encode_by_template(template, topic, message.body, message.keys)
        return encode_message(message) if frame is None else frame
    frame = encode_message(message)
    if len(tag) <= _TAG_MAX:
        _add_template(template_key)
    return frame


def _encode_by_template(template: _Template, topic: str, body: object, keys: object) -> AppendFrame | None:
    """Encode a message by its template; None when its body or keys need the general path."""
    if type(body) is not bytes or (type(keys) is not tuple and type(keys) is not list) or len(keys) > 1:
        return None
    size, keys_size = len(body), COLUMN_ABSENT
    if size > _BODY_BYTES_MAX:
        return None
    if keys:
        key = keys[0]
        if type(key) is not str or not key or len(key) > _KEY_MAX:
            return None
        if KEY_SEPARATOR in key or NAME_END in key or PAIR_END in key:
            return None
        try:
            data = key.encode()
        except UnicodeEncodeError:
            return None
        keys_size = len(data)
        payload = b"".join((_pack_length(size), body, _pack_short_length(keys_size), data))
    else:
        payload = _pack_length(size) + body
    prefix, counter = reserve(1)
    now_ms = time.time_ns() // 1_000_000
    pack, begin, middle, end = template
    options = pack(begin, size, _INT32, keys_size, middle, prefix.encode(), _UINT16, counter, _UINT64, now_ms, end)
    return AppendFrame(topic, 1, options, [payload], prefix, counter)


def _add_template(key: _TemplateKey) -> None:
    """Make the template after the second message, which the general path has checked."""
    if key not in _templates:
        if len(_templates) >= _TEMPLATES_MAX:
            _templates.clear()
        _templates[key] = None
        return
    topic, tag, queue_id = key
    request = AppendRequest(topic, 1, QUEUE_ANY if queue_id is None else queue_id, tag=tag)
    fields = list(map(msgspec.msgpack.encode, msgspec.structs.astuple(request)))
    begin = b"".join((encoded(request)[:_ARRAY_BYTES], *fields[:_SIZES_AT], _UINT32))
    middle = b"".join((*fields[_SIZES_AT + 2 : _OWN_AT], _TEXT28))
    end = b"".join(fields[_OWN_AT + 3 :])
    options = struct.Struct(f">{len(begin)}sIci{len(middle)}s{PREFIX_CHARACTERS}scHcQ{len(end)}s")
    _templates[key] = options.pack, begin, middle, end
