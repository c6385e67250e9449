"""Stored messages as text: kcat's format strings, bodies in the shape asked for, table rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from mqproc.cli.output import Column, encode_json
from mqproc.cli.times import format_time
from mqproc.errors import BadMessageError
from mqproc.types import StoredMessage
from mqproc.util.json_text import decode_json

BODIES = ("text", "hex", "json", "none")
# Of one message: only its bytes, as into a file.
RAW = "raw"
DEFAULT_FORMAT = "%d  %p:%o  %g  %k  %s\\n"
FORMAT_HELP = (
    "%t topic, %p queue, %o offset, %k keys, %g tag, %s body, %S its stored size, %T store time in ms, %d as ISO 8601, "
    "%b born time in ms, %h properties, %i message id, %u unique id, %P physical offset, %% a percent sign; "
    "\\n, \\t, \\xNN."
)
PREVIEW_CHARACTERS = 60

_FIELDS: dict[str, Callable[[StoredMessage], str]] = {
    "t": lambda message: message.topic,
    "p": lambda message: str(message.queue_id),
    "o": lambda message: str(message.queue_offset),
    "k": lambda message: " ".join(message.keys),
    "g": lambda message: message.tag,
    "S": lambda message: str(len(message.body)),
    "T": lambda message: str(message.store_timestamp_ms),
    "d": lambda message: format_time(message.store_timestamp_ms),
    "b": lambda message: str(message.born_timestamp_ms),
    "h": lambda message: ",".join(f"{name}={value}" for name, value in message.properties.items()),
    "i": lambda message: message.message_id,
    "u": lambda message: message.unique_id,
    "P": lambda message: str(message.physical_offset),
    "%": lambda message: "%",
}
_TOKEN = re.compile(r"%(.)", re.DOTALL)
_ESCAPE = re.compile(r"\\(n|t|r|0|\\|x[0-9A-Fa-f]{2})")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}

ROW_COLUMNS = [
    Column("queue_id", "queue", "number"),
    Column("queue_offset", "offset", "number"),
    Column("store_timestamp_ms", "store time", "time_ms"),
    Column("tag"),
    Column("keys"),
    Column("body"),
]
FIELD_COLUMNS = [
    Column("message_id"),
    Column("unique_id"),
    Column("topic"),
    Column("queue_id", "queue"),
    Column("queue_offset"),
    Column("physical_offset"),
    Column("size", kind="bytes"),
    Column("tag"),
    Column("keys"),
    Column("properties"),
    Column("born_timestamp_ms", "born", "time_ms"),
    Column("born_host", "born at"),
    Column("store_timestamp_ms", "stored", "time_ms"),
    Column("store_host", "stored at"),
    Column("flag"),
    Column("sys_flag"),
    Column("reconsume_times"),
    Column("body"),
]


def body_text(body: bytes) -> str:
    """A body as text; bytes that are no UTF-8 become replacement characters."""
    return body.decode("utf-8", "replace")


def shown_body(body: bytes, shape: str) -> Any:
    """A body as --body asks: text, hex, the JSON value that it is, or nothing. JSON that cannot be read is text."""
    if shape == "none":
        return None
    if shape == "hex":
        return body.hex()
    if shape == "json":
        try:
            return decode_json(body, object)
        except msgspec.MsgspecError:
            return body_text(body)
    return body_text(body)


def plain_body(message: StoredMessage) -> bytes:
    """A body before it was compressed; one that cannot be unpacked as it is stored."""
    try:
        return message.plain_body
    except BadMessageError:
        return message.body


def compile_format(text: str, body: str = "text", shown: Callable[[str], str] = str) -> Callable[[StoredMessage], str]:
    """What makes a message's line of a format string, bodies in a shape, each field as `shown` gives it back.

    Raises ValueError for an unknown token.
    """
    fields = _FIELDS | {"s": lambda message: _body_text(message, body) or ""}
    text = _ESCAPE.sub(lambda match: _ESCAPES.get(match[1]) or chr(int(match[1][1:], 16)), text)
    parts: list[str | Callable[[StoredMessage], str]] = []
    at = 0
    for match in _TOKEN.finditer(text):
        if match[1] not in fields:
            raise ValueError(f"%{match[1]} is no field; there are {FORMAT_HELP}")
        parts += [text[at : match.start()], fields[match[1]]]
        at = match.end()
    parts.append(text[at:])
    return lambda message: "".join(part if isinstance(part, str) else shown(part(message)) for part in parts)


def _body_text(message: StoredMessage, shape: str) -> str | None:
    """A body in one line's shape: JSON as text, None where none is asked for."""
    shown = shown_body(plain_body(message), shape)
    return shown if shown is None or isinstance(shown, str) else encode_json(shown)


def to_json(message: StoredMessage, body: str | None) -> dict[str, Any]:
    """A message's JSON fields; with `body` the body is there in that shape too, and not as base64 for none."""
    found = message.to_json()
    if body == "none":
        del found["body_base64"]
    elif body is not None:
        found["body"] = shown_body(plain_body(message), body)
    return found


def to_row(message: StoredMessage, body: str, *, preview: bool) -> dict[str, Any]:
    """A message's values for a table or CSV; a preview of the body is one short line."""
    text = _body_text(message, body)
    if preview and text:
        text = " ".join(text.split())
        text = text if len(text) <= PREVIEW_CHARACTERS else text[: PREVIEW_CHARACTERS - 1] + "…"
    values = message.to_json()
    del values["body_base64"]
    properties = " ".join(f"{name}={value}" for name, value in message.properties.items())
    return values | {"body": text, "unique_id": message.unique_id, "properties": properties}
