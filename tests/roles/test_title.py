"""The title that `ps` shows, set in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mqproc.roles.process_setup import process_title


def test_title_names_role_and_store() -> None:
    assert process_title("cq-flusher", Path("/data/orders")) == "mqproc: cq-flusher [/data/orders]"
    assert process_title("writer", Path("/data/lat\udce9in")) == r"mqproc: writer [/data/lat\xe9in]"


def test_title_is_seen_from_outside() -> None:
    """In a process of its own: the place for a title is found before anything changes the environment."""
    program = (
        "from pathlib import Path; from mqproc.roles.process_setup import set_title; "
        "set_title('writer', Path('/data/orders')); print(Path('/proc/self/cmdline').read_text())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip("\0 \n") == "mqproc: writer [/data/orders]"


def test_a_process_that_is_nice_forks_without_a_warning_of_threads() -> None:
    program = (
        "import os; from pathlib import Path; from mqproc.roles.process_setup import set_title; "
        "os.nice(5); set_title('commitlog-flusher', Path('/data/orders')); "
        "child = os.fork() or os._exit(0); os.waitpid(child, 0); print(Path('/proc/self/comm').read_text())"
    )
    command = [sys.executable, "-W", "always", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("mqproc:commitlo", "")
