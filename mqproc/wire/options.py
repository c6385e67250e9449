"""What all options on the wire have in common."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, array_like=True, frozen=True):
    """Base of all options: an array on the wire, so that a field added at the end is read as its default."""
