"""Compressed bodies: every RocketMQ method, and invalid data."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from unittest import mock

import msgspec
import pyarrow
import pytest

from mqproc.errors import BadMessageError
from mqproc.types import StoredMessage
from mqproc.util import compression as packing

BODY = bytes(range(256)) + b"x" * 100_000
MESSAGE = StoredMessage(topic="t", sys_flag=0x301, body=zlib.compress(BODY))


def _arrow(codec: str) -> Callable[[bytes], bytes]:
    def pack(body: bytes) -> bytes:
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, codec) as stream:
            stream.write(body)
        packed: bytes = sink.getvalue().to_pybytes()
        return packed

    return pack


WAYS = pytest.mark.parametrize(
    ("sys_flag", "pack"),
    [
        pytest.param(0x001, zlib.compress, id="zlib, as older producers say it"),
        pytest.param(0x301, zlib.compress, id="zlib"),
        pytest.param(0x101, _arrow("lz4"), id="lz4"),
        pytest.param(0x201, _arrow("zstd"), id="zstd"),
    ],
)


@WAYS
@pytest.mark.parametrize("body", [b"", b"x", BODY])
def test_compressed_body_is_unpacked(sys_flag: int, pack: Callable[[bytes], bytes], body: bytes) -> None:
    # Flags unrelated to the body, such as that of an IPv6 host, are ignored.
    assert packing.plain_body(pack(body), sys_flag | 0x34) == body


@WAYS
def test_compressed_body_truncated_is_reported(sys_flag: int, pack: Callable[[bytes], bytes]) -> None:
    for broken in (pack(BODY)[:-9], b"no such thing at all"):
        with pytest.raises(BadMessageError, match="cannot be decompressed"):
            packing.plain_body(broken, sys_flag)


@WAYS
def test_compressed_body_above_limit_is_reported(
    sys_flag: int, pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_PLAIN_BYTES_MAX", len(BODY) - 1)
    with pytest.raises(BadMessageError, match="expands to more than"):
        packing.plain_body(pack(BODY), sys_flag)


def test_compressed_body_unknown_method_is_reported() -> None:
    with pytest.raises(BadMessageError, match="RocketMQ does not define: 7"):
        packing.plain_body(BODY, 0x701)


def test_compressed_body_without_pyarrow_names_the_extra() -> None:
    with mock.patch.dict(sys.modules, {"pyarrow": None}), pytest.raises(BadMessageError, match=r"mqproc\[arrow\]"):
        packing.plain_body(BODY, 0x101)


def test_message_has_raw_and_unpacked_body() -> None:
    assert MESSAGE.plain_body == BODY
    assert MESSAGE.body == zlib.compress(BODY)
    assert msgspec.structs.replace(MESSAGE, sys_flag=0).plain_body == MESSAGE.body
