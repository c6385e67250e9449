"""`mqproc/settings.json`: the options of the running group, for its roles and for tools."""

from __future__ import annotations

import json
from typing import Any

from mqproc.config.options import Options
from mqproc.config.parse import parse_saved
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths


def write_settings(io: StoreIO, paths: StorePaths, options: Options) -> None:
    """Save the options. Raises OSError."""
    io.write_file_atomically(paths.settings, json.dumps(options.to_dict(), indent=1).encode(), mode=0o600)


def read_settings(io: StoreIO, paths: StorePaths) -> Options:
    """Load the options. Raises as `read_values`."""
    return Options(**read_values(io, paths))


def read_values(io: StoreIO, paths: StorePaths) -> dict[str, Any]:
    """Saved options by name, without unknown ones of other versions.

    Raises OSError, ValueError, and ConfigurationError for an invalid value.
    """
    try:
        text = io.read_file(paths.settings)
    except IsADirectoryError:
        raise ValueError("not a file") from None
    return parse_saved(text, str(paths.settings))
