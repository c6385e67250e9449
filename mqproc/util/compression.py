"""Decompression of bodies that RocketMQ's producers compress, by default from 4 KiB on.

Stores, exports, replays and `StoredMessage.body` keep the compressed bytes and their flags.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

from mqproc.errors import BadMessageError

_COMPRESSED: Final = 0x1
_TYPE_SHIFT: Final = 8
_TYPE_MASK: Final = 0x7
_ZLIB_TYPES: Final = (0, 3)  # Old producers set no type.
_ARROW_CODECS: Final = {1: "lz4", 2: "zstd"}
# A few bytes may expand to any length. RocketMQ's producers limit bodies to 4 MiB before compression.
_PLAIN_BYTES_MAX: Final = 1 << 28


def plain_body(body: bytes, sys_flag: int) -> bytes:
    """Decompress a body as the flags of its message say; return an uncompressed one unchanged.

    Raises BadMessageError for invalid data; lz4 and zstd require pyarrow.
    """
    if not sys_flag & _COMPRESSED:
        return body
    kind = sys_flag >> _TYPE_SHIFT & _TYPE_MASK
    plain = _inflate(body) if kind in _ZLIB_TYPES else _unpack(body, kind)
    if len(plain) > _PLAIN_BYTES_MAX:
        raise BadMessageError(f"a compressed body of {len(body):,} bytes expands to more than {_PLAIN_BYTES_MAX:,}")
    return plain


def _inflate(body: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(body, _PLAIN_BYTES_MAX + 1)
    except zlib.error as error:
        raise BadMessageError(f"a compressed body cannot be decompressed: {error}") from None
    if not unpacking.eof and len(plain) <= _PLAIN_BYTES_MAX:
        raise BadMessageError("a compressed body cannot be decompressed: it is truncated")
    return plain


def _unpack(body: bytes, kind: int) -> bytes:
    codec = _ARROW_CODECS.get(kind)
    if codec is None:
        raise BadMessageError(f"a body has a compression type that RocketMQ does not define: {kind}")
    try:
        import pyarrow
    except ImportError:
        raise BadMessageError(f"bodies compressed with {codec} require pyarrow: pip install 'mqproc[arrow]'") from None
    stream: Any = pyarrow.CompressedInputStream(pyarrow.BufferReader(body), codec)
    try:
        return bytes(stream.read(_PLAIN_BYTES_MAX + 1))
    except OSError as error:
        raise BadMessageError(f"a compressed body cannot be decompressed: {error}") from None
