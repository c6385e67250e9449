"""Frames and requests that a role refuses, as a table's rows: raw bytes, or a frame with options that cannot be."""

from __future__ import annotations

import struct
from typing import Any

from mqproc.errors import FilterSyntaxError
from mqproc.layout.control import QUERY, WRITER
from mqproc.layout.frame import HEADER, MAGIC, VERSION
from mqproc.wire.operations import AppendRequest, Operation
from mqproc.wire.options import Options
from tests.bad_input.raw_client import RawClient
from tests.bad_input.scene import Answer, Row, Scene

Request = tuple[int, Options | bytes, bytes]


def header(
    operation: int = 16,
    *,
    magic: int = MAGIC,
    version: int = VERSION,
    options: int = 0,
    zero: int = 0,
    payload: int = 0,
) -> bytes:
    """A frame's header, right but for the changes."""
    return HEADER.pack(magic, version, operation, 1, options, zero, payload)


def append(topic: str = "known", body: bytes = b"body", columns: bytes = b"", **changes: Any) -> Request:
    """A frame of one message, as a client would send it but for the changes."""
    given: dict[str, Any] = {"topic": topic, "count": 1, "bodies_bytes": len(body)} | changes
    return Operation.APPEND, AppendRequest(**given), struct.pack("<I", len(body)) + body + columns


def append_properties(data: bytes) -> Request:
    """A frame of one message with a whole property string."""
    return append(columns=struct.pack("<H", len(data) & 0xFFFF) + data, properties_bytes=len(data))


def append_sharded(key: bytes, **changes: Any) -> Request:
    """A frame of one message with a column of sharding keys."""
    given: dict[str, Any] = {"columns": struct.pack("<H", len(key)) + key, "sharding_bytes": len(key)}
    return append(**(given | changes))


def cut(number: int, name: str, code: str, says: str, data: bytes) -> Row:
    """Raw bytes, refused with the connection's end."""

    def does(scene: Scene) -> Answer:
        return _told(scene, WRITER, data)

    return Row(number, name, does, code, says, closes=True, refused_by=WRITER)


def refused(number: int, name: str, code: str, says: str, data: bytes | Request, role: str = WRITER) -> Row:
    """A frame, or its parts, refused on a connection that goes on."""

    def does(scene: Scene) -> Answer:
        return _told(scene, role, data)

    return Row(number, name, does, code, says, refused_by=role)


def question(number: int, name: str, code: str, says: str, operation: Operation, options: Options | bytes) -> Row:
    """A request to the query role, refused."""
    return refused(number, name, code, says, (operation, options, b""), QUERY)


def _told(scene: Scene, role: str, data: bytes | Request) -> Answer:
    with RawClient(scene.group.paths.socket(role)) as client:
        if isinstance(data, bytes):
            client.send(data)
        else:
            client.request(*data)
        error = client.refusal()
        at = f"; position {error.position}" if isinstance(error, FilterSyntaxError) else ""
        return Answer(error.code, f"{error}{at}", closed=not client.serves())
