"""Java's `String.hashCode` and the hash of an index key, without compiled kernels.

`mqproc.kernels.hashing` does the same for bytes in a buffer.
"""

from __future__ import annotations

import sys

from mqproc.layout.index_file import KEY_TOPIC_SEPARATOR

_UTF_16 = "utf-16-le" if sys.byteorder == "little" else "utf-16-be"


def java_hash(text: str) -> int:
    """`String.hashCode`: h = 31 h + u over UTF-16 code units, lone surrogates included; an i32."""
    hashed = 0
    for unit in memoryview(text.encode(_UTF_16, "surrogatepass")).cast("H"):
        hashed = (31 * hashed + unit) & 0xFFFFFFFF
    return (hashed ^ 0x80000000) - 0x80000000


def index_key_hash(hashed: int) -> int:
    """|hash|, and 0 for −2³¹, which has no absolute value as an i32: the hash of an index item."""
    return 0 if hashed == -0x80000000 else abs(hashed)


def queue_of_hash(hashed: int, queues: int) -> int:
    """Queue of a sharding key's hash, as in RocketMQ's SelectMessageQueueByHash.

    |hash mod queues|.
    """
    return abs(hashed) % queues


def index_key_hash_of(topic: str, key: str) -> int:
    """Index key hash of `topic#key`; modulo the number of slots it selects the slot."""
    return index_key_hash(java_hash(f"{topic}{KEY_TOPIC_SEPARATOR}{key}"))
