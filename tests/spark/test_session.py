"""Settings that a session's processes are started with."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from mqproc.errors import ConfigurationError
from mqproc.spark.session import LOGGING, prepare_environment, settings_of, write_script

MASTER = "local[2]"


def test_chosen_python_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"PYSPARK_PYTHON": "/opt/python"})
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    prepare_environment()
    assert os.environ["PYSPARK_PYTHON"] == "/opt/python"
    # Its workers are Spark's own.
    assert SOCKETS not in settings_of(MASTER, {})
    # No folder is created: the name may already belong to another user.
    assert not list(tmp_path.glob("mqproc-python-*"))


@pytest.mark.parametrize(
    ("master", "is_local"), [("local", True), ("local-cluster[2,1,1024]", True), ("spark://far:7077", False)]
)
def test_local_settings_apply_to_local_masters_only(
    master: str, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("PYSPARK_PYTHON", "SPARK_LOCAL_IP"):
        os.environ.pop(name, None)
    prepare_environment(master)
    assert (os.environ["PYSPARK_PYTHON"] == sys.executable) is not is_local
    assert (settings_of(master, {}).get(SOCKETS) == "true") is is_local
    assert settings_of(master, {SOCKETS: "false"})[SOCKETS] == "false"
    own = {settings_of(master, {}).get(f"spark.driver.{name}") for name in ("host", "bindAddress")}
    assert own | {os.environ.get("SPARK_LOCAL_IP")} == ({"127.0.0.1"} if is_local else {None})


SOCKETS = "spark.python.unix.domain.socket.enabled"
OPTIONS = "spark.driver.extraJavaOptions"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Spark as installed by pip, without settings."""
    for name in ("SPARK_CONF_DIR", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.usefixtures("bare")
def test_log_level_settings() -> None:
    assert LOGGING.is_file()
    arrow = "-Darrow.enable_unsafe_memory_access=true"
    ours = f'{arrow} "-Dlog4j2.configurationFile={LOGGING.as_uri()}" -Dmqproc.log.level='
    assert settings_of(MASTER, {})[OPTIONS] == f"-XX:+UseParallelGC {ours}ERROR"
    given = {OPTIONS: "-Xss4m -XX:+UseZGC", "spark.log.level": "INFO"}
    assert settings_of(MASTER, given)[OPTIONS] == f"-Xss4m -XX:+UseZGC {ours}INFO"


def test_chosen_options_are_kept(bare: pytest.MonkeyPatch) -> None:
    given = {
        OPTIONS: "-Darrow.enable_unsafe_memory_access=false -XX:+UseSerialGC -Dlog4j2.configurationFile=file:/l.xml"
    }
    assert settings_of(MASTER, given)[OPTIONS] == given[OPTIONS]
    for name in ("SPARK_CONF_DIR", "SPARK_HOME"):
        with bare.context() as there:
            there.setenv(name, "/opt/spark")
            assert OPTIONS not in settings_of(MASTER, {})


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another user takes root")
def test_folder_of_other_user_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    program = write_script("java", "one", "#!/bin/sh\n")
    assert program.read_text() == "#!/bin/sh\n"
    assert program.parents[1].stat().st_mode & 0o777 == 0o700
    folder = program.parents[1]
    os.chown(folder, 65534, 65534)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        write_script("java", "one", "#!/bin/sh\n")
    # A link to a folder of this user is rejected too.
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path)
    os.chown(folder, 65534, 65534, follow_symlinks=False)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        write_script("java", "one", "#!/bin/sh\n")
