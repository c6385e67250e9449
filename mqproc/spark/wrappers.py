"""Small scripts around programs that Spark starts, each in a folder of this user alone among temporary files."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from mqproc.errors import ConfigurationError


def place_of(name: str, around: str) -> Path:
    """Where a script is, or would be: `bin/NAME` in a folder of its own, as `around` tells it from others."""
    key = hashlib.sha256(around.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"mqproc-{name}-{os.getuid()}-{key}" / "bin" / name


def wrapper(name: str, around: str, script: str) -> Path:
    """The script at its place, with this text. Raises ConfigurationError when another user has made its folder."""
    program = place_of(name, around)
    folder = program.parents[1]
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():  # A link may lead into a folder of this user's.
        raise ConfigurationError(f"{folder} belongs to another user")
    folder.chmod(0o700)
    program.parent.mkdir(exist_ok=True)
    if not program.exists() or program.read_text() != script:
        fresh = program.with_name(f"{name}.{os.getpid()}")
        fresh.write_text(script)
        fresh.chmod(0o700)
        fresh.rename(program)
    return program
