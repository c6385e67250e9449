"""How a command on Spark ends when it is told to: jobs stop at once, Java goes, nothing of their insides is printed.

    signal ──main thread waits for Java──▶ a thread cancels all jobs ──▶ Java answers so ──▶ the command ends
        │                                          └──after a while──▶ Java's process is ended
        └──it does not───────────────────▶ raised there and then

What a handler raises while the main thread waits for an answer would break the connection off in the middle, and the
session would then be stopped behind the job that runs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType, SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import psutil

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_S: Final = 0.05
# So long a job may take to stop and to remove what it has written by half; then Java may take as long for its files.
_PATIENCE_S: Final = 2.0


@contextlib.contextmanager
def kept_from_spark() -> Iterator[None]:
    """Signals stay as they are while a session starts: Spark's own Ctrl-C raises amid what Java is asked."""
    from pyspark.core import context

    sparks: Any = context
    sparks.signal = SimpleNamespace(SIGINT=signal.SIGINT, signal=lambda number, handler: None)
    try:
        yield
    finally:
        sparks.signal = signal


class Ending:
    """Signals while a session is there. `owns_java`: its process was started by this one, and ends with it."""

    def __init__(self, *, owns_java: bool) -> None:
        self._owns_java = owns_java
        self._spark: SparkSession | None = None
        self._number = 0
        self._left = threading.Event()
        self._handlers: dict[signal.Signals, Any] = {}
        self._others = set(psutil.Process().children())

    @property
    def is_asked(self) -> bool:
        """Whether a signal has come."""
        return self._number != 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in _SIGNALS}
            self._handlers = {number: each for number, each in found.items() if each not in (None, signal.SIG_IGN)}
        self._listen()
        return self

    def started(self, spark: SparkSession) -> None:
        """The session is there."""
        self._spark = spark

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Raises what ends a command, instead of what its jobs failed with, when a signal has come."""
        self._left.set()
        if self._owns_java and (self._number or self._spark is None):
            self._end_java()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._number == signal.SIGINT:
            raise KeyboardInterrupt from None
        if self._number:
            raise SystemExit(128 + self._number) from None

    def _listen(self) -> None:
        for number in self._handlers:
            signal.signal(number, self._asked)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        is_first, self._number = not self._number, number
        if is_first:
            self._silence()
            threading.Thread(target=self._stop, daemon=True).start()
        if _waits_for_java(frame):
            return
        handler = self._handlers[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        raise SystemExit(128 + number)

    def _silence(self) -> None:
        """Have nobody print a trace for each connection that ends."""
        logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
        server = getattr(getattr(self._spark, "_sc", None), "_accumulatorServer", None)
        if server is not None:
            server.handle_error = lambda request, address: None

    def _stop(self) -> None:
        """Cancel jobs until the main thread has left; end Java when it does not, or when there is no session yet."""
        ends_s = time.monotonic() + (_PATIENCE_S if self._owns_java else math.inf)
        with contextlib.suppress(Exception):
            if self._spark is not None:
                self._spark.sparkContext.setLogLevel("OFF")
                while not self._left.wait(_AGAIN_S) and time.monotonic() < ends_s:
                    self._spark.sparkContext.cancelAllJobs()
        if self._owns_java and not self._left.is_set():
            self._end_java()

    def _end_java(self) -> None:
        """End what was started meanwhile: Java, with time to remove its files, and then its Python processes."""
        started = set(psutil.Process().children(recursive=True)) - self._others
        direct = [each for each in psutil.Process().children() if each in started]
        for each in direct:
            _signal(each, signal.SIGTERM)
        psutil.wait_procs(direct, _PATIENCE_S)
        for each in started:
            _signal(each, signal.SIGKILL)
        psutil.wait_procs(list(started), _PATIENCE_S)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _waits_for_java(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("py4j."):
            return True
        frame = frame.f_back
    return False
