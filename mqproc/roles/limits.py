"""What one client of a role may take, from the options."""

from __future__ import annotations

from mqproc.config import Options
from mqproc.wire.limits import Limits


def client_limits(options: Options) -> Limits:
    """The socket server's limits."""
    return Limits(
        connections=options.max_connections,
        frame_bytes=options.max_frame_bytes,
        output_bytes=options.client_output_bytes,
        frame_read_s=options.frame_read_timeout_ms / 1000,
    )
