"""The Python that a session on this machine starts, and its way to Java."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Final

from mqproc.spark.wrappers import place_of, wrapper
from mqproc.wire.address import is_abandoned

_NAME: Final = "python"
# Spark calls them "/.", 36 characters, ".sock"; what the kernel takes includes a zero behind.
_SOCKET_NAME_BYTES: Final = 43
_SOCKET_PATH_BYTES_MAX: Final = 107
# One that is being made is nobody's for a moment.
_FRESH_S: Final = 60.0

# Spark asks for `-m pyspark.daemon`: planning, other than tasks, whatever spark.python.daemon.module says.
_SCRIPT: Final = """#!/bin/sh
PYTHONPATH="${{0%/*/*}}/packages:$PYTHONPATH"
export PYTHONPATH
[ "$1 $2" = "-m pyspark.daemon" ] && shift 2 && set -- -m mqproc.spark.daemon "$@"
exec "{python}" "$@"
"""


def python_program() -> Path:
    """This Python, for Spark's processes: it finds PySpark where it is installed, and its workers end quietly.

    Spark puts an archive of PySpark's sources before that, which each process would compile again, for a second.
    Raises ConfigurationError when another user has made its folder.
    """
    package = _package()
    program = wrapper(_NAME, _around(package), _SCRIPT.format(python=sys.executable))
    packages = program.parents[1] / "packages"
    packages.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (packages / "pyspark").symlink_to(package)
    return program


def is_ours(program: str) -> bool:
    """Whether this is the program of `python_program`, which is not made for that."""
    return program == str(place_of(_NAME, _around(_package())))


def _package() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent


def _around(package: Path) -> str:
    return f"{sys.executable} {package}"


def sockets_beside(program: Path) -> dict[str, str]:
    """Settings by which batches come by Unix sockets in a folder of this user alone; none where its path is too long.

    By TCP a full read takes a tenth to a quarter more time. What killed sessions have left there goes.
    """
    folder = program.parents[1] / "sockets"
    if len(os.fsencode(folder)) + _SOCKET_NAME_BYTES > _SOCKET_PATH_BYTES_MAX:
        return {}
    folder.mkdir(exist_ok=True)
    _remove_abandoned(folder)
    return {
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.unix.domain.socket.dir": str(folder),
    }


def _remove_abandoned(folder: Path) -> None:
    """Remove sockets that no process has any more, of whatever container."""
    for path in folder.glob(".*.sock"):
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_mtime < time.time() - _FRESH_S and is_abandoned(str(path)):
                path.unlink()
