"""Importing it loads the client and compiled code: for a process that others are forked from."""

from __future__ import annotations

from mqproc import Client
from mqproc.cli.admin.kernel_cache import make_ready

assert Client
make_ready()
