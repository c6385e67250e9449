"""`mqproc bench`: this store measured with real clients, beside the limits of the machine it runs on."""

from __future__ import annotations

from mqproc.bench.commands import bench

__all__ = ["bench"]
