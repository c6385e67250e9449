"""Java's class archive: creation, reuse by the same Java and Spark, rejection by others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyspark
import pytest

from mqproc.errors import InternalError
from mqproc.spark import session
from mqproc.spark.session import Java, LoadedClasses, archive_of, archive_options, find_java, make_archive, settings_of

TIMEOUT_S = 120
OPTIONS = "spark.driver.extraJavaOptions"
OPENS = "--add-opens=java.base/java.lang=ALL-UNNAMED"
FOLDERS = session.archive_folders
JARS = Path(pyspark.__file__).parent / "jars"


@pytest.fixture(scope="module")
def java() -> Java:
    return find_java()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where archives are kept; the first candidate folder cannot be created."""
    (tmp_path / "file").touch()
    folders = [tmp_path / "file" / "below", tmp_path / "a folder"]
    monkeypatch.setattr(session, "archive_folders", lambda: folders)
    return folders[1]


def started(java: Java, *options: str, jars: Sequence[Path]) -> subprocess.CompletedProcess[str]:
    command = [java.home / "bin" / "java", *options, "-cp", os.pathsep.join(map(str, jars)), "-version"]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.fixture
def jars() -> list[Path]:
    return sorted(JARS.glob("*slf4j*.jar"))


@pytest.fixture
def loaded(java: Java, jars: list[Path], tmp_path: Path) -> LoadedClasses:
    class_list = tmp_path / "classes"
    assert started(java, f"-XX:DumpLoadedClassList={class_list}", jars=jars).returncode == 0
    return LoadedClasses(class_list, ["-Xmx1g", OPENS], os.pathsep.join(map(str, jars)))


def test_folders_without_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container whose user has no name and no home directory."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert FOLDERS()[1] == tmp_path / ".cache" / "mqproc"
    monkeypatch.setattr(Path, "home", lambda: Path("~nobody-of-that-name").expanduser())
    assert FOLDERS() == [Path(session.__file__).parent / "__pycache__"]


def test_archive_is_used_by_later_starts(java: Java, jars: list[Path], loaded: LoadedClasses, folder: Path) -> None:
    assert archive_of(java) is None
    assert archive_options(java, "") == []
    archive = make_archive(java, loaded)
    assert archive.parent == folder
    assert archive_of(java) == archive
    # A second run replaces the archive.
    assert make_archive(java, loaded) == archive
    assert len(list(folder.iterdir())) == 2
    options = [each.strip('"') for each in archive_options(java, "-Xmx1g")]
    # Java exits with an error if it must use an unusable file.
    assert started(java, *options, OPENS, "-Xshare:on", jars=jars).returncode == 0
    archive.chmod(0o600)
    os.truncate(archive, 1000)
    assert started(java, *options, OPENS, "-Xshare:on", jars=jars).returncode == 1
    # Otherwise it ignores the file silently.
    without = started(java, *options, OPENS, jars=jars)
    assert (without.returncode, without.stdout) == (0, "")
    assert without.stderr.splitlines()[0] == java.build.splitlines()[0]


def test_archive_is_not_used_by_other_java_or_spark(
    java: Java, loaded: LoadedClasses, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_archive(java, loaded)
    assert archive_of(replace(java, build="openjdk 99")) is None
    with monkeypatch.context() as other:
        other.setattr(pyspark.version, "__version__", "9.9")
        assert archive_of(java) is None
    with monkeypatch.context() as other:
        other.setattr(pyspark, "__file__", "/elsewhere/pyspark/__init__.py")
        assert archive_of(java) is None
    (archive,) = folder.glob("*.jsa")
    archive.unlink()
    assert archive_of(java) is None


def test_archive_option_is_set_unless_given(java: Java, loaded: LoadedClasses, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPARK_CONF_DIR", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    archive = make_archive(java, loaded)
    named = f'"-XX:SharedArchiveFile={archive}"'
    assert named in settings_of("local", {}, java)[OPTIONS]
    assert named not in settings_of("local", {})[OPTIONS]
    for option in ("-XX:SharedArchiveFile=/other.jsa", "-Xshare:off"):
        assert named not in settings_of("local", {OPTIONS: option}, java)[OPTIONS]


def test_archive_failed_creation_reports_reason(java: Java, loaded: LoadedClasses, folder: Path) -> None:
    with pytest.raises(InternalError, match="no class-data archive"):
        make_archive(java, replace(loaded, class_list=loaded.class_list.with_name("missing")))
    assert list(folder.iterdir()) == []


def test_archive_without_writable_folder_raises(
    java: Java, loaded: LoadedClasses, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = session.archive_folders()[:1]
    monkeypatch.setattr(session, "archive_folders", lambda: folders)
    with pytest.raises(InternalError, match="below cannot be written to"):
        make_archive(java, loaded)


COMMAND = """
import sys
from pathlib import Path
from mqproc.cli import main
from mqproc.spark import session
folder = Path(sys.argv.pop(1))
session.archive_folders = lambda: [folder]
sys.exit(main())
"""
MAPPED = """
import sys
from pathlib import Path
from mqproc.spark import local_session, messages
from mqproc.spark import session
session.archive_folders = lambda: [Path(sys.argv[1])]
spark = local_session("local[1]", warnings=False)
pid = spark._jvm.java.lang.ProcessHandle.current().pid()
print(sys.argv[1] in Path(f"/proc/{pid}/maps").read_text(), messages(spark, sys.argv[2]).count())
spark.stop()
"""


def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_warm_creates_archive_for_sessions(tmp_path: Path, rolled_store: Path) -> None:
    kept = tmp_path / "kept"
    made, again = (run(COMMAND, kept, "warm", "--spark", "--json") for _ in range(2))
    assert (made.returncode, again.returncode) == (0, 0), made.stderr + again.stderr
    assert [json.loads(each.stdout)["spark"]["made"] for each in (made, again)] == [True, False]
    assert Path(json.loads(made.stdout)["spark"]["file"]).parent == kept
    done = run(MAPPED, kept, rolled_store)
    assert done.stdout.split() == ["True", "640"], done.stderr
    assert not re.search(r"^\[", done.stderr, re.MULTILINE), done.stderr
