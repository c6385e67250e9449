"""The package's version, and the time at which this process imported it."""

from __future__ import annotations

import time
from typing import Final


def installed_version() -> str:
    """Version in the package's metadata."""
    # Imported here: with its dependencies it takes longer to import than a short command.
    import importlib.metadata

    try:
        return importlib.metadata.version("mqproc")
    except importlib.metadata.PackageNotFoundError:
        return "0+checkout"  # Not installed.


IMPORTED_NS: Final = time.time_ns()
"""Unix time in ns, before any other module of the package: later imports may be of a newer version."""
