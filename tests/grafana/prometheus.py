"""A real Prometheus on loopback, with the rules' durations divided by thirty."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from grafana.source.files import dump, prometheus_config
from grafana.source.rules import rule_files
from grafana.source.settings import Durations

SHORT = Durations(1 / 30)
PATIENCE_S = 120.0


def free_port() -> int:
    """A free port outside the range of ephemeral ports."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", random.randrange(1024, given))) as found:
            return int(found.getsockname()[1])


class Prometheus:
    """Runs within a `with` block."""

    def __init__(self, folder: Path, targets: list[int]) -> None:
        """`targets`: ports of the monitors."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, rules in rule_files(SHORT).items():
            (folder / name).write_text(dump(rules))
        config = prometheus_config(SHORT, [f"127.0.0.1:{port}" for port in targets], str(folder))
        (folder / "prometheus.yml").write_text(dump(config))
        self._port = free_port()
        self._output = folder / "output"
        self._command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
            "--log.level=warn",
        ]

    def __enter__(self) -> Prometheus:
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output)
        self.wait(self._ready, "Prometheus answers")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(10)

    def query(self, expr: str) -> list[Any]:
        """Series of an instant query."""
        found: list[Any] = self._get("/api/v1/query", query=expr)["result"]
        return found

    def targets_up(self) -> int:
        return sum(int(series["value"][1]) for series in self.query("up"))

    def firing(self) -> set[tuple[str, str]]:
        """(alert, port of the group) of every firing alert."""
        alerts = self._get("/api/v1/alerts")["alerts"]
        return {
            (alert["labels"]["alertname"], alert["labels"]["instance"].rpartition(":")[2])
            for alert in alerts
            if alert["state"] == "firing"
        }

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
        """Value of the condition once it is true."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert self._process.poll() is None, self._output.read_text()
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
            time.sleep(0.2)
        return found

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self._port}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = json.loads(answer.read())
        assert found["status"] == "success", found
        return found["data"]


# promtool


REASON = "Prometheus is not installed: apt-get install prometheus"
needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None, reason=REASON
)


def promtool(*arguments: str | Path, stdin: str = "") -> None:
    """Run promtool, and fail with its output if it reports a problem."""
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
