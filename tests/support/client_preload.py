"""Preload of the fork server for client processes: imports the client and compiled code."""

from __future__ import annotations

from mqproc import Client
from mqproc.cli.admin.engine_hooks import make_ready

assert Client
make_ready()
