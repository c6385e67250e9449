"""The monitor role: /metrics, /healthz, /readyz and a status page, from the control file.

It starts first, before recovery, and stops last. If the port is in use, as by another group, the store runs without it
and the monitor retries.
"""

from __future__ import annotations

from mqproc.config.options import Options
from mqproc.ipc.bell import EventBell
from mqproc.layout import control
from mqproc.metrics.app import make_app
from mqproc.metrics.collector import MetricsCollector
from mqproc.metrics.server import AsgiServer
from mqproc.roles.role import RoleContext
from mqproc.roles.role_log import get_logger
from mqproc.util.version import installed_version

RETRY_NS = 5_000_000_000


class Monitor:
    """The monitor. Its bell is an EventBell, which can be polled together with sockets."""

    name = control.MONITOR

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._words = context.control.words
        self._log = get_logger()
        io, paths = context.io, context.paths
        version = installed_version()
        self._collector = MetricsCollector(context.control, io, paths, context.options, version)
        self._app = make_app(self._collector, paths, version)
        self._server: AsgiServer | None = None
        self._retry_ns = 0
        # A killed predecessor may have left its port.
        self._words[control.MONITOR_PORT] = 0
        self._listen()

    def do_work(self) -> int:
        if self._server is None and self._context.clock.monotonic_ns() >= self._retry_ns:
            self._listen()
        return self._poll(0)

    def wait(self, timeout_s: float) -> None:
        if self._server is None:
            self._context.bell.wait(timeout_s)
        else:
            self._poll(timeout_s)

    def reload(self, options: Options) -> None:
        """Apply options that pages show."""
        self._collector.options = options

    def on_stop(self) -> bool:
        return True

    def close(self) -> None:
        self._words[control.MONITOR_PORT] = 0
        if self._server is not None:
            self._server.close()
            self._server = None
        self._collector.close()

    def _poll(self, timeout_s: float) -> int:
        if self._server is None:
            return 0
        answered = self._server.poll(timeout_s)
        self._words.add(control.SCRAPES, answered)
        return answered

    def _listen(self) -> None:
        options = self._context.options
        try:
            server = AsgiServer(self._app, options.metrics_host, options.metrics_port)
        except OSError as error:
            self._retry_ns = self._context.clock.monotonic_ns() + RETRY_NS
            address = f"{options.metrics_host}:{options.metrics_port}"
            self._log.warning(
                "metrics are not offered", address=address, error=error.strerror, remedy="set metrics_port"
            )
            return
        bell = self._context.bell
        if isinstance(bell, EventBell):
            server.watch(bell.fileno())
        self._server = server
        self._words[control.MONITOR_PORT] = server.port
