"""Files that this process has open below a folder.

How many it has in all is nothing to go by: what other tests have left behind may be closed at any time.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def open_below(folder: Path) -> list[str]:
    """A path for each descriptor; one that was removed ends with " (deleted)"."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        # The one that lists them is closed by now.
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in found if name.startswith(f"{folder}/")]
