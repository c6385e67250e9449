"""The store that a tool is asked about, and its options: what its group ran with, unless the caller says otherwise."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mqproc.cli.invocation import Invocation
from mqproc.config import Options, Setting, check_together, options_from
from mqproc.errors import ConfigurationError
from mqproc.io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store.existing import check_is_store
from mqproc.store.settings import read_values

if TYPE_CHECKING:
    from typing import Any

_OF_ROLES: Final = frozenset({"broker_ip", "broker_name"})
"""What only a group that is to run must have: RocketMQ's own broker.conf may name a host there."""


def store_of(invocation: Invocation, io: StoreIO, folder: Path | None) -> StorePaths:
    """The store in a command's FOLDER, else the one that --store and the like name. Raises StoreAccessError."""
    paths = StorePaths(folder.absolute()) if folder else invocation.paths()
    check_is_store(io, paths)
    return paths


def options_for(invocation: Invocation, io: StoreIO, paths: StorePaths) -> Options:
    """Flags, environment and config file, then the store's own `mqproc/settings.json`, then defaults.

    Settings that nobody can read are passed over: `store verify` tells of them. Raises ConfigurationError.
    """
    kept = {name: Setting(value, str(paths.settings)) for name, value in _settings_of(io, paths).items()}
    return options_from(kept | _said(invocation))


def options_without_store(invocation: Invocation) -> Options:
    """Flags, environment and config file, then defaults. Raises ConfigurationError."""
    return options_from(_said(invocation))


def _said(invocation: Invocation) -> dict[str, Setting]:
    settings = invocation.settings()
    return {name: settings[name] for name in settings.keys() - _OF_ROLES if settings[name].source != "default"}


def _settings_of(io: StoreIO, paths: StorePaths) -> dict[str, Any]:
    try:
        values = {name: value for name, value in read_values(io, paths).items() if name not in _OF_ROLES}
        check_together(dataclasses.replace(Options(), **values))
    except (OSError, ValueError, ConfigurationError):
        return {}
    return values
