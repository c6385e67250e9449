"""A run of the example pipeline: a folder with specification, code, tables and state; Spark's own tool runs it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import pyarrow.dataset as ds

from mqproc.errors import ConfigurationError, InternalError
from mqproc.spark.jobs.targets import check_target
from mqproc.spark.session import prepare_environment
from mqproc.util.signals import deferred_signals

TABLES: Final = ("flights", "hourly_counts", "carrier_delays", "dead_letters")
TIMEOUT_S: Final = 1800.0
_TOOL: Final = "spark-pipelines"
_LAST_LINES: Final = 20
# So long Spark's processes may take to end by themselves.
_PATIENCE_S: Final = 3.0
_AGAIN_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class PipelineFolder:
    """Where a pipeline lives. Tables are Parquet, `warehouse/TABLE/`."""

    root: Path

    @property
    def specification(self) -> Path:
        return self.root / "spark-pipeline.yml"

    def table(self, name: str) -> Path:
        """The folder of a table's files."""
        return self.root / "warehouse" / name

    def rows(self, name: str) -> int:
        """How many rows a table has."""
        return int(ds.dataset(self.table(name), format="parquet").count_rows())


def prepare(root: Path, store: Path) -> PipelineFolder:
    """Put the example's code and a specification for a store into a folder; code that is there stays as it is.

    Raises BadRequestError for a folder in a store or around it: a run removes the tables that lie there.
    """
    check_target(root, [store])
    folder = PipelineFolder(root.absolute())
    code = folder.root / "transformations" / "flights.py"
    code.parent.mkdir(parents=True, exist_ok=True)
    if not code.exists():
        shutil.copyfile(Path(__file__).with_name("flights.py"), code)
    # JSON is YAML too.
    specification = {
        "name": "flights",
        "storage": (folder.root / "state").as_uri(),
        "libraries": [{"glob": {"include": "transformations/**"}}],
        "configuration": {"mqproc.store": str(store.absolute())},
    }
    folder.specification.write_text(json.dumps(specification, indent=2) + "\n")
    return folder


def run(folder: PipelineFolder, master: str, settings: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> None:
    """Make all tables anew from what the store has now; what a failed run leaves is no table.

    Raises InternalError with what Spark said, ConfigurationError without the tool.
    """
    tool = Path(sys.executable).with_name(_TOOL)
    program = str(tool) if tool.exists() else shutil.which(_TOOL)
    if program is None:
        raise ConfigurationError(f"{_TOOL} is not installed: pip install 'mqproc[pipelines]'")
    prepare_environment(master)
    # The catalog lives as long as a run, and knows nothing of tables that lie there.
    shutil.rmtree(folder.root / "warehouse", ignore_errors=True)
    # Spark's tool starts a server, which hears of no setting on the command line.
    lines = [f"{name} {value}\n" for name, value in (_settings(folder) | dict(settings)).items()]
    conf = folder.root / "conf"
    conf.mkdir(exist_ok=True)
    (conf / "spark-defaults.conf").write_text("".join(lines))
    command = [program, "run", "--spec", str(folder.specification), "--remote", master]
    environment = os.environ | {"SPARK_CONF_DIR": str(conf)}
    with (folder.root / "last-run.log").open("w+") as log:
        failed = not _is_done(command, folder.root, environment, log, timeout_s)
        log.seek(0)
        said = log.read().splitlines()
    if failed:
        raise InternalError("\n".join([f"{folder.root}: the pipeline failed:", *_told(said)]))


def _is_done(command: list[str], folder: Path, environment: Mapping[str, str], log: IO[str], timeout_s: float) -> bool:
    """Run a program; whether it ended well in time. However this ends, no process that it has started stays."""
    with contextlib.ExitStack() as stack:
        with deferred_signals():
            running = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            # What is left of its session: the tool's server would go on making tables.
            stack.callback(_end_group, running)
        try:
            return running.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            return False


def _end_group(running: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(_PATIENCE_S)
        ends_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < ends_s:
            os.killpg(running.pid, 0)
            time.sleep(_AGAIN_S)
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


def _told(lines: list[str]) -> Iterator[str]:
    """What the tool said last, without Java's stack traces."""
    yield from [line for line in lines if not line.lstrip().startswith("at ")][-_LAST_LINES:]
