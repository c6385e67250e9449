"""Text of a record's fields: properties and hosts."""

from __future__ import annotations

import functools
import ipaddress
from typing import Final

NAME_END: Final = "\x01"
PAIR_END: Final = "\x02"
CRC32: Final = "__CRC32#"


def decode(text: str) -> dict[str, str]:
    """Decode a stored string of properties by RocketMQ's rules.

    Pairs without name or value are ignored, and the last pair of a name wins. mqproc's CRC pair is dropped, since it
    belongs to the record and not to the message.
    """
    pairs = {}
    for part in text.split(PAIR_END):
        name, _, value = part.partition(NAME_END)
        if value and name:
            pairs[name] = value
    pairs.pop(CRC32, None)
    return pairs


# Several properties of one message are often read in turn.
@functools.lru_cache(64)
def properties_of(stored: bytes) -> dict[str, str]:
    """Properties of a stored string, whatever its bytes. The caller must not change them."""
    return decode(stored.decode("utf-8", "replace"))


@functools.lru_cache(4096)
def host_text(host: bytes) -> str:
    """A host as `address:port`, an IPv6 address in brackets; empty for none."""
    if not host:
        return ""
    address, port = ipaddress.ip_address(host[:-4]), int.from_bytes(host[-4:], "big", signed=True)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
