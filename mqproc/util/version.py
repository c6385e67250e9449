"""The package's version."""

from __future__ import annotations


def installed_version() -> str:
    """Version in the package's metadata."""
    # Imported here: with its dependencies it takes longer to import than a short command.
    import importlib.metadata

    try:
        return importlib.metadata.version("mqproc")
    except importlib.metadata.PackageNotFoundError:
        return "0+checkout"  # Not installed.
