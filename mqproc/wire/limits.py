"""What a server of sockets gives one client."""

from __future__ import annotations

from dataclasses import dataclass

from mqproc.config import MIB


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may take. Sizes in bytes, times in seconds.

    `requests_per_poll`: one connection gives at most so many requests a poll; the others wait in its buffer.
    """

    connections: int = 1024
    frame_bytes: int = 64 * MIB
    output_bytes: int = 128 * MIB
    frame_read_s: float = 30.0
    output_grace_s: float = 10.0
    requests_per_poll: int = 4096
