"""The title that `ps` shows, set in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

from mqproc.process.title import process_title, set_title


def test_title_names_role_and_store() -> None:
    assert process_title("cq-flusher", Path("/data/orders")) == "mqproc: cq-flusher [/data/orders]"


def test_title_is_seen_from_outside() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        set_title("writer", Path("/data/orders"))
        os.write(writer, Path("/proc/self/cmdline").read_bytes().rstrip(b"\0"))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as title:
        assert title.read().strip(b"\0 ") == b"mqproc: writer [/data/orders]"
    os.waitpid(child, 0)
