"""`mqproc bench`: measure this store with real clients, beside this machine's limits."""

from __future__ import annotations

from mqproc.bench.commands import bench

__all__ = ["bench"]
