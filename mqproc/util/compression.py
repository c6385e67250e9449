"""Bodies that RocketMQ's producers have compressed: from 4 KiB on, unless they are told otherwise.

The store keeps them as they came, and so do exports, replays and `StoredMessage.body`: the flags that tell go along.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

from mqproc.errors import BadMessageError

_COMPRESSED: Final = 0x1
_TYPE_SHIFT: Final = 8
_TYPE_MASK: Final = 0x7
_ZLIB_TYPES: Final = (0, 3)  # Older producers write no type.
_ARROW_CODECS: Final = {1: "lz4", 2: "zstd"}
# A few bytes may unpack to any length. RocketMQ's producers refuse bodies above a limit of 4 MiB before they compress.
_PLAIN_BYTES_MAX: Final = 1 << 28


def plain_body(body: bytes, sys_flag: int) -> bytes:
    """A body as it was before its producer compressed it, by the flags of its message; one that is not, as it is.

    Raises BadMessageError when it cannot be unpacked; lz4 and zstd take pyarrow.
    """
    if not sys_flag & _COMPRESSED:
        return body
    kind = sys_flag >> _TYPE_SHIFT & _TYPE_MASK
    plain = _inflate(body) if kind in _ZLIB_TYPES else _unpack(body, kind)
    if len(plain) > _PLAIN_BYTES_MAX:
        raise BadMessageError(f"a compressed body of {len(body):,} bytes unpacks to more than {_PLAIN_BYTES_MAX:,}")
    return plain


def _inflate(body: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(body, _PLAIN_BYTES_MAX + 1)
    except zlib.error as error:
        raise BadMessageError(f"a compressed body cannot be unpacked: {error}") from None
    if not unpacking.eof and len(plain) <= _PLAIN_BYTES_MAX:
        raise BadMessageError("a compressed body cannot be unpacked: it is cut")
    return plain


def _unpack(body: bytes, kind: int) -> bytes:
    codec = _ARROW_CODECS.get(kind)
    if codec is None:
        raise BadMessageError(f"a body is compressed in a way that RocketMQ does not have: {kind}")
    try:
        import pyarrow
    except ImportError:
        raise BadMessageError(f"bodies of {codec} are unpacked by pyarrow: pip install 'mqproc[arrow]'") from None
    stream: Any = pyarrow.CompressedInputStream(pyarrow.BufferReader(body), codec)
    try:
        return bytes(stream.read(_PLAIN_BYTES_MAX + 1))
    except OSError as error:
        raise BadMessageError(f"a compressed body cannot be unpacked: {error}") from None
