"""Stored messages as text: format strings as in kcat, bodies, table rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from mqproc.cli.output import encode_json, output_columns
from mqproc.errors import BadMessageError
from mqproc.types import StoredMessage
from mqproc.util.json_text import decode_json
from mqproc.util.units import format_time

BODIES = ("text", "hex", "json", "none")
# For a single message: only its bytes.
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

ROW_COLUMNS = output_columns(
    "queue_id:number:queue, queue_offset:number:offset, store_timestamp_ms:time_ms:store time, tag, keys", "body"
)
FIELD_COLUMNS = output_columns(
    "message_id, unique_id, topic, queue_id:text:queue, queue_offset, physical_offset, size:bytes, tag, keys",
    "properties, born_timestamp_ms:time_ms:born, born_host:text:born at, store_timestamp_ms:time_ms:stored",
    "store_host:text:stored at, flag, sys_flag, reconsume_times, body",
)


def body_text(body: bytes) -> str:
    """Decode a body; invalid UTF-8 becomes replacement characters."""
    return body.decode("utf-8", "replace")


def shown_body(body: bytes, shape: str) -> Any:
    """Format a body: text (also for invalid JSON), hex, its JSON value, or None."""
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
    """The decompressed body, or the stored one if it cannot be decompressed."""
    try:
        return message.plain_body
    except BadMessageError:
        return message.body


def compile_format(text: str, body: str = "text", escape: Callable[[str], str] = str) -> Callable[[StoredMessage], str]:
    """Compile a format string to a function that formats a message.

    `escape` is applied to each field.

    Raises ValueError for an unknown token.
    """
    fields = _FIELDS | {"s": lambda message: _body_text(message, body) or ""}
    text = _ESCAPE.sub(lambda match: _ESCAPES.get(match[1]) or chr(int(match[1][1:], 16)), text)
    parts: list[str | Callable[[StoredMessage], str]] = []
    at = 0
    for match in _TOKEN.finditer(text):
        if match[1] not in fields:
            raise ValueError(f"%{match[1]} is not a field; there are {FORMAT_HELP}")
        parts += [text[at : match.start()], fields[match[1]]]
        at = match.end()
    parts.append(text[at:])
    return lambda message: "".join(part if isinstance(part, str) else escape(part(message)) for part in parts)


def _body_text(message: StoredMessage, shape: str) -> str | None:
    """Format a body as text, JSON encoded; None for shape none."""
    shown = shown_body(plain_body(message), shape)
    return shown if shown is None or isinstance(shown, str) else encode_json(shown)


def to_json(message: StoredMessage, body: str | None) -> dict[str, Any]:
    """The JSON fields of a message, with the body in the shape `body`, or none for "none"."""
    found = message.to_json()
    if body == "none":
        del found["body_base64"]
    elif body is not None:
        found["body"] = shown_body(plain_body(message), body)
    return found


def to_row(message: StoredMessage, body: str, *, preview: bool) -> dict[str, Any]:
    """The values of a message for a table or CSV; with `preview` the body is one short line."""
    text = _body_text(message, body)
    if preview and text:
        text = " ".join(text.split())
        text = text if len(text) <= PREVIEW_CHARACTERS else text[: PREVIEW_CHARACTERS - 1] + "…"
    values = message.to_json()
    del values["body_base64"]
    properties = " ".join(f"{name}={value}" for name, value in message.properties.items())
    return values | {"body": text, "unique_id": message.unique_id, "properties": properties}
