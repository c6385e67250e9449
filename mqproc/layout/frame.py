"""The frame: a fixed header, msgspec-encoded options, then columns of raw bytes.

Little-endian.

    ┌───────────┬─────────────┬───────────────┬────────────────┬──────────────────┬──────────┬──────────────────┐
    │ magic u32 │ version u16 │ operation u16 │ request id u64 │ options size u32 │ zero u32 │ payload size u64 │
    │ 0         │ 4           │ 6             │ 8              │ 16               │ 20       │ 24               │
    └───────────┴─────────────┴───────────────┴────────────────┴──────────────────┴──────────┴──────────────────┘
      then `options size` bytes of MessagePack, then `payload size` bytes

An answer has its request's id and operation with ANSWER set; a refusal has REFUSAL set too and ErrorAnswer as options.
Request ids count from 1. Answers may come in another order than the requests.
"""

from __future__ import annotations

import struct

MAGIC = 0x4350514D  # "MQPC", little-endian
VERSION = 1
HEADER = struct.Struct("<IHHQIIQ")
HEADER_SIZE = HEADER.size
assert HEADER_SIZE == 32
# Byte offsets of the fields.
VERSION_AT, OPERATION_AT, REQUEST_ID_AT, OPTIONS_SIZE_AT, ZERO_AT, PAYLOAD_SIZE_AT = 4, 6, 8, 16, 20, 24

# First fields of a header, enough to identify the protocol.
GREETING = struct.Struct("<IH")

ANSWER = 0x8000
REFUSAL = 0x4000
OPERATION_MASK = 0x3FFF

# A refusal with this request id applies to the connection, which is then closed.
CONNECTION_ID = 0


def encode_header(operation: int, request_id: int, options_size: int, payload_size: int) -> bytes:
    """Encode the 32 bytes before the options."""
    return HEADER.pack(MAGIC, VERSION, operation, request_id, options_size, 0, payload_size)
