"""Progress of long work on stderr: a bar on a terminal, else a line every few seconds; nothing for what is quick."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from mqproc.cli.output import Output, format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

LINE_EVERY_S = 5.0
_BAR_EVERY_S = 0.1


class Progress:
    """Told again and again how far the work is: `done` of `total` units, and a count of things for the rate.

    `rate_unit` is what the rate is told in where things are no pieces.
    """

    def __init__(
        self, out: Output, title: str, things: str = "records", *, rate_unit: str = "", quiet: bool = False
    ) -> None:
        self._out = out
        self._title = title
        self._things = things
        self._per_second = f" {rate_unit}/s" if rate_unit else "/s"
        self._quiet = quiet
        self._terminal = out.errors.isatty()
        self._started_s = time.monotonic()
        self._due_s = self._started_s + (_BAR_EVERY_S if self._terminal else LINE_EVERY_S)
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self.count = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def rate(self) -> float:
        """Things per second since the beginning."""
        return self.count / max(self.seconds, 1e-9)

    def update(self, done: float, total: float, count: int) -> None:
        """`done` and `total` in one unit; `total` 0 when it is not known."""
        self.count = count
        now_s = time.monotonic()
        if self._quiet or now_s < self._due_s:
            return
        if self._terminal:
            self._due_s = now_s + _BAR_EVERY_S
            self._draw(done, total)
        else:
            self._due_s = now_s + LINE_EVERY_S
            self._out.note(self._line(done, total))

    def end(self, done: float, total: float, count: int) -> None:
        """The last state; the bar stays as it is then."""
        self.count = count
        if self._bar is not None:
            self._draw(done, total or done)
            self._bar.stop()
            self._bar = None

    def _line(self, done: float, total: float) -> str:
        share = f", {done / total:.0%}" if total else ""
        return f"{self._title}: {self.count:,} {self._things}{share}, {self.rate:,.0f}{self._per_second}"

    def _draw(self, done: float, total: float) -> None:
        if self._bar is None:
            self._bar, self._task = self._make_bar(total)
        assert self._task is not None
        self._bar.update(
            self._task, completed=done, total=total or None, count=f"{self.count:,}", rate=f"{self.rate:,.0f}"
        )

    def _make_bar(self, total: float) -> tuple[Bar, TaskID]:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[count]} " + self._things),
            TextColumn("{task.fields[rate]}" + self._per_second),
            TimeRemainingColumn(),
            console=self._out.console(errors=True),
        )
        task = bar.add_task(self._title, total=total or None, count="0", rate="0")
        bar.start()
        return bar, task


def rate_text(count: float, seconds: float, size: float = 0) -> str:
    """`177,000/s` or `177,000/s, 54.3 MiB/s`."""
    rate = f"{count / max(seconds, 1e-9):,.0f}/s"
    return f"{rate}, {format_bytes(size / max(seconds, 1e-9))}/s" if size else rate
