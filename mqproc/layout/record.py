"""The CommitLog record (RocketMQ 5.3).

    ┌───────────┬───────┬─────────┬─────────┬──────┬──────────────┬─────────────────┬─────────┐
    │ total i32 │ magic │ bodyCRC │ queueId │ flag │ queueOffset  │ physicalOffset  │ sysFlag │
    │ 0         │ 4     │ 8       │ 12      │ 16   │ 20 (i64)     │ 28 (i64)        │ 36      │
    ├───────────┴───┬───┴───────┬─┴─────────┴──────┴──┬───────────┼─────────────────┴─────────┤
    │ bornTime i64  │ bornHost B│ storeTime i64       │ storeHost S│ reconsume i32, prepared i64│
    │ 40            │ 48        │ 48+B                │ 56+B       │ 56+B+S         60+B+S      │
    ├───────────────┼───────────┼─────────────────────┼───────────┴──────────┬────────────────┤
    │ bodyLength i32│ body      │ topicLength L bytes │ topic                │ propLength i16  │ properties
    │ 68+B+S        │ 72+B+S    │ 72+B+S+body         │                      │                 │
    └───────────────┴───────────┴─────────────────────┴──────────────────────┴────────────────┘

B and S are 8 for an IPv4 host and 20 for IPv6 (address, then port as i32); L is 1 in V1 and 2 in V2. All numbers are
big-endian. A record has no padding. A BLANK is 8 bytes, the remaining size as i32 and its magic; it fills the rest of a
segment, whatever bytes follow.
"""

from __future__ import annotations

import struct

from mqproc.layout import Field

MAGIC_V1 = 0xDAA320A7 - (1 << 32)
MAGIC_V2 = 0xDAA320AB - (1 << 32)
MAGIC_BLANK = 0xCBD43194 - (1 << 32)

TOTAL_SIZE = 0
MAGIC = TOTAL_SIZE + 4
BODY_CRC = MAGIC + 4
QUEUE_ID = BODY_CRC + 4
FLAG = QUEUE_ID + 4
QUEUE_OFFSET = FLAG + 4
PHYSICAL_OFFSET = QUEUE_OFFSET + 8
SYS_FLAG = PHYSICAL_OFFSET + 8
BORN_TIMESTAMP = SYS_FLAG + 4
BORN_HOST = BORN_TIMESTAMP + 8

HOST_V4_SIZE = 8
HOST_V6_SIZE = 20

# Fields before the hosts, and fields between the hosts and the body.
HEAD = struct.Struct(">iiiiiqqiq")
TAIL = struct.Struct(">iqi")
assert HEAD.size == BORN_HOST

# The following offsets apply to two IPv4 hosts; each IPv6 host before a field adds IPV6_EXTRA.
IPV6_EXTRA = HOST_V6_SIZE - HOST_V4_SIZE
STORE_TIMESTAMP = BORN_HOST + HOST_V4_SIZE
STORE_HOST = STORE_TIMESTAMP + 8
RECONSUME_TIMES = STORE_HOST + HOST_V4_SIZE
PREPARED_TRANSACTION_OFFSET = RECONSUME_TIMES + 4
BODY_LENGTH = PREPARED_TRANSACTION_OFFSET + 8
BODY = BODY_LENGTH + 4
assert RECONSUME_TIMES + TAIL.size == BODY

# An empty V1 record with IPv4 hosts: total = 91 + body + topic + properties.
FIXED_SIZE_V4 = BODY + 1 + 2
assert BODY_LENGTH == 84
assert FIXED_SIZE_V4 == 91

# The length of the properties is a Java short.
PROPERTIES_SIZE_MAX = 32767
# RocketMQ's encoder rejects records larger than the maximum body plus this.
RECORD_OVERHEAD_MAX = 65536
TOPIC_V1_CHARACTERS_MAX = 127
TOPIC_SIZE_MAX = 255

BLANK_SIZE = 8

# Fields in order: name, size in bytes, meaning. The size of a host holds for IPv4, that of the topic's length for V1. A
# field of size -1 has the length that the field before it holds.
FIELDS = (
    ("total_size", 4, "of the whole record"),
    ("magic", 4, "V1 daa320a7, V2 daa320ab"),
    ("body_crc", 4, "CRC-32 of the body without its highest bit"),
    ("queue_id", 4, ""),
    ("flag", 4, "the producer's own"),
    ("queue_offset", 8, "position in its queue"),
    ("physical_offset", 8, "position in the log"),
    ("sys_flag", 4, "1 compressed, 4/8/12 prepared/commit/rollback, 16/32 IPv6 hosts"),
    ("born_timestamp_ms", 8, "producer's clock"),
    ("born_host", HOST_V4_SIZE, "producer's address and port"),
    ("store_timestamp_ms", 8, "writer's clock"),
    ("store_host", HOST_V4_SIZE, "broker's address and port"),
    ("reconsume_times", 4, ""),
    ("prepared_transaction_offset", 8, "of the half message"),
    ("body_length", 4, ""),
    ("body", -1, "as it is stored"),
    ("topic_length", 1, "one byte in V1, two in V2"),
    ("topic", -1, ""),
    ("properties_length", 2, ""),
    ("properties", -1, "name 01 value 02 …"),
)
BLANK_FIELDS = (
    Field("remaining", 0, 4, "bytes from here to the segment's end"),
    Field("magic", 4, 4, "BLANK: the log continues in the next segment"),
)

SYS_FLAG_COMPRESSED = 0x1
SYS_FLAG_BODY = 0x701
"""Flags for the compression of a body; they belong to the body."""
SYS_FLAG_TRANSACTION_MASK = 0xC
SYS_FLAG_PREPARED = 0x4
SYS_FLAG_COMMIT = 0x8
SYS_FLAG_ROLLBACK = 0xC
SYS_FLAG_BORN_HOST_V6 = 0x10
SYS_FLAG_STORE_HOST_V6 = 0x20

# Tail of the properties if `enabled_append_prop_crc` is on: name, 0x01, ten digits reversed, 0x02.
CRC_NAME = b"__CRC32#"
CRC_DIGITS = 10
CRC_TAIL_SIZE = len(CRC_NAME) + 1 + CRC_DIGITS + 1
assert CRC_TAIL_SIZE == 20
# Properties of this size fit every store: with the CRC tail, and with a separator added before it.
PROPERTIES_SIZE_SURE = PROPERTIES_SIZE_MAX - CRC_TAIL_SIZE - 1
