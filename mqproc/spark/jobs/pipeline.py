"""Run the example pipeline in a folder, by Spark's own tool."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow.dataset as ds

from mqproc.errors import ConfigurationError, InternalError
from mqproc.spark.jobs.output import check_target
from mqproc.spark.session import prepare_environment
from mqproc.util.signals import deferred_signals

TABLES: Final = ("flights", "hourly_counts", "carrier_delays", "dead_letters")
TIMEOUT_S: Final = 1800.0
_TOOL: Final = "spark-pipelines"
_LAST_LINES: Final = 20
# Time for Spark's processes to exit by themselves.
_EXIT_TIMEOUT_S: Final = 3.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class PipelineFolder:
    """A pipeline's folder. Tables are Parquet files in `warehouse/TABLE/`."""

    root: Path

    @property
    def specification(self) -> Path:
        return self.root / "spark-pipeline.yml"

    def table(self, name: str) -> Path:
        """The folder of a table's files."""
        return self.root / "warehouse" / name

    def rows(self, name: str) -> int:
        """The number of rows of a table."""
        return int(ds.dataset(self.table(name), format="parquet").count_rows())


def prepare(root: Path, store: Path) -> PipelineFolder:
    """Put the example's code, unless it exists, and a specification for a store into a folder.

    Raises BadRequestError for a folder that overlaps a store, since a run removes the folder's tables.
    """
    check_target(root, [store])
    folder = PipelineFolder(root.absolute())
    code = folder.root / "transformations" / "flights.py"
    code.parent.mkdir(parents=True, exist_ok=True)
    if not code.exists():
        shutil.copyfile(Path(__file__).with_name("flights.py"), code)
    # YAML is a superset of JSON.
    specification = {
        "name": "flights",
        "storage": (folder.root / "state").as_uri(),
        "libraries": [{"glob": {"include": "transformations/**"}}],
        "configuration": {"mqproc.store": str(store.absolute())},
    }
    folder.specification.write_text(json.dumps(specification, indent=2) + "\n")
    return folder


def run(folder: PipelineFolder, master: str, settings: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> None:
    """Build all tables from the store's present content. A failed run leaves no valid tables.

    Raises InternalError with Spark's output, ConfigurationError when the tool is not installed.
    """
    tool = Path(sys.executable).with_name(_TOOL)
    program = str(tool) if tool.exists() else shutil.which(_TOOL)
    if program is None:
        raise ConfigurationError(f"{_TOOL} is not installed: pip install 'mqproc[pipelines]'")
    prepare_environment(master)
    # The catalog is in memory and does not know the tables of an earlier run.
    shutil.rmtree(folder.root / "warehouse", ignore_errors=True)
    # Spark's tool starts a server, which takes no settings from the command line.
    lines = [f"{name} {value}\n" for name, value in (_settings(folder) | dict(settings)).items()]
    conf = folder.root / "conf"
    conf.mkdir(exist_ok=True)
    (conf / "spark-defaults.conf").write_text("".join(lines))
    command = [program, "run", "--spec", str(folder.specification), "--remote", master]
    environment = os.environ | {"SPARK_CONF_DIR": str(conf)}
    log = folder.root / "last-run.log"
    if not _succeeds(command, folder.root, environment, log, timeout_s):
        # Without Java's stack traces.
        lines = [line for line in log.read_text().splitlines() if not line.lstrip().startswith("at ")]
        raise InternalError("\n".join([f"{folder.root}: the pipeline failed:", *lines[-_LAST_LINES:]]))


def _succeeds(command: list[str], folder: Path, environment: Mapping[str, str], log: Path, timeout_s: float) -> bool:
    """Run a program; whether it succeeds in time. No process that it has started remains."""
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("w"))
        with deferred_signals():
            running = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            # The tool's server would otherwise continue to build tables.
            stack.callback(_end_group, running)
        try:
            return running.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            return False


def _end_group(running: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(_EXIT_TIMEOUT_S)
        ends_s = time.monotonic() + _EXIT_TIMEOUT_S
        while time.monotonic() < ends_s:
            os.killpg(running.pid, 0)
            time.sleep(_POLL_S)
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()


def _settings(folder: PipelineFolder) -> dict[str, str]:
    return {
        "spark.sql.warehouse.dir": str(folder.root / "warehouse"),
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.maxResultSize": "16m",
    }
