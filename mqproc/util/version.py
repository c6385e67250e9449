"""Which version of the package this is."""

from __future__ import annotations

import time
from typing import Final


def installed_version() -> str:
    """As the package's metadata say."""
    # With what it needs of e-mail it takes longer than the modules of a short command.
    import importlib.metadata

    try:
        return importlib.metadata.version("mqproc")
    except importlib.metadata.PackageNotFoundError:
        return "0+checkout"  # One that is not installed.


# --- began ---
# When this process began to import the package: what it imports later may be of another version by then.


IMPORTED_NS: Final = time.time_ns()
"""Unix time in ns. `mqproc` imports this module before all others."""
