"""Preload of the fork server for client processes: loads the client and compiled code on import."""

from __future__ import annotations

from mqproc import Client
from mqproc.cli.admin.kernel_cache import make_ready

assert Client
make_ready()
