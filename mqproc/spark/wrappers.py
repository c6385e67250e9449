"""Small scripts around programs that Spark starts, each in a folder of this user alone among temporary files."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from mqproc.errors import ConfigurationError


def wrapper(name: str, around: str, script: str) -> Path:
    """`bin/NAME` with the script's text, in a folder that nothing else has: `around` tells it from others.

    Raises ConfigurationError when another user has made that folder.
    """
    key = hashlib.sha256(around.encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"mqproc-{name}-{os.getuid()}-{key}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():  # A link may lead into a folder of this user's.
        raise ConfigurationError(f"{folder} belongs to another user")
    folder.chmod(0o700)
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    if not program.exists() or program.read_text() != script:
        fresh = program.with_name(f"{name}.{os.getpid()}")
        fresh.write_text(script)
        fresh.chmod(0o700)
        fresh.rename(program)
    return program
