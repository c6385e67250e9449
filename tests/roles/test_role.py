"""The loop of every role: steps, waits, heartbeats, stops and exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from mqproc.config.options import Options
from mqproc.errors import BadRequestError, ConfigurationError, CorruptStoreError
from mqproc.io.fault_injection import FaultInjectionIO
from mqproc.io.store_io import Clock, StoreIO
from mqproc.ipc import bell as bell_module
from mqproc.ipc.bell import LINGERING, MAX_WAIT_S, EventBell, SemaphoreBell
from mqproc.ipc.control import Control
from mqproc.ipc.counters import Buckets, read_buckets
from mqproc.layout import control as layout
from mqproc.layout.histograms import STEPS
from mqproc.paths import StorePaths
from mqproc.roles.role import (
    BEAT_NS,
    RETURN_NS,
    SLOW_STEP_NS,
    Heartbeat,
    Role,
    RoleContext,
    RoleSpec,
    log_lost_page,
    run_role,
)
from mqproc.store.access import write_settings

IO = StoreIO()
NAME = layout.KEEPER


class Scripted(Role):
    """A role that runs the test's action at each step, then asks itself to stop."""

    name = NAME

    def __init__(self, context: RoleContext, steps: list[int], stops: int = 1) -> None:
        self.context = context
        self.log: list[str] = []
        self.waits: list[float] = []
        self._steps = iter(steps)
        self._stops = stops

    def state(self) -> int:
        return self.context.control.load(layout.role_word(NAME, "state"))

    def sleeping(self) -> int:
        return self.context.control.load(layout.role_word(NAME, "sleeping"))

    def do_work(self) -> int:
        done = next(self._steps, None)
        if done is None:
            os.kill(os.getpid(), signal.SIGTERM)
            return 0
        self.log.append(f"work {done}{' again' if self.sleeping() else ''}")
        return done

    def wait(self, timeout_s: float) -> None:
        self.log.append("wait" if self.sleeping() else "wait unannounced")
        self.waits.append(timeout_s)

    def on_stop(self) -> bool:
        assert self.state() == layout.STATE_STOPPING
        self._stops -= 1
        self.log.append("stop")
        return self._stops == 0

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def context(tmp_path: Path) -> Iterator[RoleContext]:
    paths = StorePaths(tmp_path)
    control = Control.create(IO, paths, Clock(), os.getpid())
    bell = EventBell(control.cells, layout.role_word(NAME, "sleeping"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield RoleContext(
        name=NAME,
        paths=paths,
        options=Options(max_spin_us=0),
        control=control,
        io=StoreIO(),
        clock=Clock(),
        bells={NAME: bell},
        sockets={},
        incarnation=1,
        heartbeat=Heartbeat(control, NAME, Clock()),
    )
    for number, handler in handlers.items():
        signal.signal(number, handler)
    bell.close()


def run(context: RoleContext, factory: Callable[[RoleContext], object]) -> int:
    with tempfile.TemporaryFile() as trace:
        return run_role(RoleSpec(NAME, factory), context, trace.fileno())  # type: ignore[arg-type]


def run_script(context: RoleContext, steps: list[int], stops: int = 1) -> Scripted:
    made: list[Scripted] = []

    def factory(context: RoleContext) -> Scripted:
        made.append(Scripted(context, steps, stops))
        return made[0]

    assert run(context, factory) == 0
    return made[0]


def test_loop_works_while_there_is_work_and_checks_before_waiting(context: RoleContext) -> None:
    role = run_script(context, [3, 1, 0, 0, 5, 0, 0, 0, 2])
    assert role.log == [
        *("work 3", "work 1", "work 0", "work 0 again", "wait"),
        *("work 5", "work 0", "work 0 again", "wait"),
        *("work 0", "work 2 again"),  # Found at the second look, so there is no wait.
        *("stop", "close"),
    ]


class PendingRequest(Scripted):
    """Checks its bell instead of a step."""

    def __init__(self, context: RoleContext, steps: list[int], news: list[bool]) -> None:
        super().__init__(context, steps)
        self._news = iter(news)

    def has_news(self) -> bool:
        self.log.append("asked" if self.sleeping() else "asked before it is to be rung")
        return next(self._news, True)


def test_loop_role_without_news_waits_without_another_step(context: RoleContext) -> None:
    made: list[PendingRequest] = []

    def factory(context: RoleContext) -> PendingRequest:
        made.append(PendingRequest(context, [1, 0, 0, 0, 2, 0], [False, True, True]))
        return made[0]

    assert run(context, factory) == 0
    assert made[0].log == [
        *("work 1", "work 0", "asked", "wait"),
        *("work 0", "asked", "work 0 again", "wait"),
        *("work 2", "work 0", "asked"),
        *("stop", "close"),
    ]


class Lingerer(Scripted):
    """Lingers after work as long as `pauses` last; each is read twice."""

    pauses = (0.001, 0.001, 0.001, 0.001, 0.0)

    def linger_s(self) -> float:
        pause_s, *rest = self.pauses
        self.pauses = tuple(rest)
        self.log.append(f"linger {pause_s:g}{' lying low' if self.sleeping() == LINGERING else ''}")
        return pause_s


def test_loop_lingering_role_polls_before_arming_its_bell(context: RoleContext) -> None:
    made: list[Lingerer] = []

    def factory(context: RoleContext) -> Lingerer:
        made.append(Lingerer(context, [1, 100, 0, 0, 0, 1, 0, 0]))
        return made[0]

    assert run(context, factory) == 0
    assert made[0].log == [
        *("work 1", "linger 0.001", "linger 0.001 lying low"),
        *(
            "work 100",
            "work 0",
            "linger 0.001",
            "linger 0.001 lying low",
        ),  # A large step is followed by the next one at once.
        *("work 0", "work 0 again", "wait"),  # Nothing came meanwhile: no second pause.
        *("work 1", "linger 0", "work 0", "work 0 again", "wait"),  # Now another role waits for this one.
        *("stop", "close"),
    ]


class Hurried(Lingerer):
    """A waiter arrives just before or after the role lingers, which would last a minute."""

    def linger_s(self) -> float:
        if self.pauses == (60.0,):
            self.context.bell.expedite()
        return super().linger_s()


@pytest.mark.parametrize(("pauses", "times"), [((60.0, 0.0), 2), ((60.0, 60.0), 2)], ids=["seen", "rung"])
def test_loop_expedite_ends_the_linger(context: RoleContext, pauses: tuple[float, ...], times: int) -> None:
    made: list[Hurried] = []

    def factory(context: RoleContext) -> Hurried:
        made.append(Hurried(context, [1, 0, 0]))
        made[0].pauses = pauses
        return made[0]

    began = time.monotonic()
    assert run(context, factory) == 0
    assert time.monotonic() - began < MAX_WAIT_S / 2
    assert sum(line.startswith("linger") for line in made[0].log) == times
    assert made[0].log[-4:] == ["work 0 again", "wait", "stop", "close"]


def test_loop_stops_in_steps_until_the_role_is_done(context: RoleContext) -> None:
    assert run_script(context, [], stops=3).log == ["stop", "stop", "stop", "close"]


def test_loop_waits_are_shorter_than_the_heartbeat(context: RoleContext) -> None:
    assert run_script(context, [0, 0, 0, 0]).waits == [1.0, 1.0]


def test_loop_counts_steps_that_did_work(context: RoleContext) -> None:
    run_script(context, [1, 0, 7, 0, 0])
    assert context.control.load(layout.role_word(NAME, "cycles")) == 2


class TimedRole(Scripted):
    """Takes `took_ns` for each step by the loop's clock; records each timed step."""

    def __init__(self, context: RoleContext, took_ns: list[int], steps: list[int], wait_ns: int) -> None:
        super().__init__(context, steps)
        self.timed_steps: list[tuple[int, bool]] = []
        self.silences_ns: list[int] = []
        """How long the last heartbeat was ago, at each step's begin."""
        self._took_ns = iter(took_ns)
        self._wait_ns = wait_ns

    def do_work(self) -> int:
        self.silences_ns.append(self._now_ns() - self.context.control.load(layout.role_word(NAME, "heartbeat_ns")))
        self._pass(next(self._took_ns, 0))
        return super().do_work()

    def wait(self, timeout_s: float) -> None:
        self._pass(self._wait_ns)
        super().wait(timeout_s)

    def _now_ns(self) -> int:
        return self.context.clock.monotonic_ns()

    def _pass(self, time_ns: int) -> None:
        clock = self.context.clock
        assert isinstance(clock, SteppedClock)
        clock.now_ns += time_ns

    def timed(self, began_ns: int, ended_ns: int, *, alone: bool) -> None:
        self.timed_steps.append((ended_ns - began_ns, alone))


class SteppedClock(Clock):
    """A clock that advances only by the duration of steps."""

    now_ns = 1_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns


def run_timed(
    context: RoleContext, took_ns: list[int], steps: list[int] | None = None, wait_ns: int = 0
) -> tuple[TimedRole, Buckets]:
    clock = SteppedClock()
    context = dataclasses.replace(context, clock=clock, heartbeat=Heartbeat(context.control, NAME, clock))
    made: list[TimedRole] = []

    def factory(context: RoleContext) -> TimedRole:
        made.append(TimedRole(context, took_ns, steps or [1] * len(took_ns), wait_ns))
        return made[0]

    assert run(context, factory) == 0
    return made[0], read_buckets(context.control.words, STEPS[NAME])


def test_loop_samples_one_step_for_those_before_it(context: RoleContext) -> None:
    """The first step is timed; the next, 10 ms later, counts for the 100 steps between."""
    role, found = run_timed(context, [30_000, *[100_000] * 100, 200_000, 100_000])
    assert role.timed_steps == [(30_000, False), (200_000, False)]
    # The last has no later one to count it: it counts with the one timed before.
    assert sum(found.counts) == 1 + 101 + 1
    assert found.total == pytest.approx((30_000 + 102 * 200_000) / 1e9)
    assert context.control.load(layout.role_word(NAME, "cycles")) == 103


def test_loop_slow_step_is_always_timed_and_counts_alone(context: RoleContext) -> None:
    role, found = run_timed(context, [30_000, 100_000, SLOW_STEP_NS, 2 * SLOW_STEP_NS, 50_000, 50_000])
    assert role.timed_steps == [(30_000, False), (SLOW_STEP_NS, True), (2 * SLOW_STEP_NS, True), (50_000, False)]
    # The step of 100 µs is counted with the first one of 50 µs, and so is the last.
    assert found.total == pytest.approx((30_000 + 3 * SLOW_STEP_NS + 3 * 50_000) / 1e9)
    assert sum(found.counts) == 6


def test_loop_first_step_after_a_wait_does_not_count_for_others(
    context: RoleContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bursts of one short and nine long steps: a regular sample would miss the long ones."""
    monkeypatch.setattr("mqproc.roles.role.random", random.Random(1))
    bursts = 300
    took_ns, steps = [0], [1]
    for _ in range(bursts):
        took_ns += [10_000, *[500_000] * 9, 0, 0]
        steps += [*[1] * 10, 0, 0]
    role, found = run_timed(context, took_ns, steps, wait_ns=20_000_000)
    assert role.log.count("wait") >= bursts
    assert sum(found.counts) == 1 + 10 * bursts
    assert found.total == pytest.approx(sum(took_ns) / 1e9, rel=0.05)
    assert 0.02 * len(role.timed_steps) < role.timed_steps.count((10_000, False)) < 0.2 * len(role.timed_steps)


def test_loop_counts_steps_of_a_failing_role(context: RoleContext) -> None:
    class Failing(Scripted):
        def do_work(self) -> int:
            if len(self.log) == 3:
                raise RuntimeError("a bug")
            return super().do_work()

    assert run(context, lambda made: Failing(made, [1] * 5)) == 1
    assert context.control.load(layout.role_word(NAME, "cycles")) == 3


def test_heartbeat_follows_each_long_wait(context: RoleContext) -> None:
    """The next sample is drawn from the time worked: that must not suppress heartbeats."""
    cycles, wait_ns = 400, BEAT_NS
    took_ns = [1000, 60 * 10**9, 1000, 1000] + [0] * (2 * cycles)
    role, _ = run_timed(context, took_ns, [1, 1, 1, 1] + [0] * (2 * cycles), wait_ns)
    assert role.log.count("wait") == cycles
    assert max(role.silences_ns[4:]) < BEAT_NS


class Peaking(TimedRole):
    """Frees most of 32 MiB in its first step, between blocks in use; records its memory at each step."""

    def __init__(self, context: RoleContext, steps: list[int], wait_ns: int) -> None:
        super().__init__(context, [], steps, wait_ns)
        self.uss_bytes: list[int] = []
        self._blocks: list[np.ndarray] = []

    def do_work(self) -> int:
        if not self._blocks:
            self._blocks = [np.ones(1 << 16, dtype=np.uint8) for _ in range(512)][::16]
        self.uss_bytes.append(psutil.Process().memory_full_info().uss)
        return super().do_work()


def test_loop_returns_memory_freed_between_blocks_in_use(context: RoleContext) -> None:
    clock = SteppedClock()
    made: list[Peaking] = []

    def factory(context: RoleContext) -> Peaking:
        made.append(Peaking(context, [1] + [0] * 8, RETURN_NS // 2))
        return made[0]

    assert run(dataclasses.replace(context, clock=clock), factory) == 0
    found = made[0].uss_bytes
    assert max(found) - found[-1] > 24 << 20


def test_heartbeat_publishes_the_state(context: RoleContext) -> None:
    began = time.monotonic_ns()
    role = run_script(context, [0])
    words = context.control
    assert words.load(layout.role_word(NAME, "state")) == layout.STATE_STOPPING
    assert began <= words.load(layout.role_word(NAME, "state_since_ns")) <= time.monotonic_ns()
    assert began <= words.load(layout.role_word(NAME, "heartbeat_ns")) <= time.monotonic_ns()
    assert role.sleeping() == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CorruptStoreError("damage"), 6),
        (ConfigurationError("wrong"), 8),
        (BadRequestError("a request that should have been refused"), 1),
        (RuntimeError("a bug"), 1),
    ],
)
def test_loop_error_is_logged_and_sets_the_exit_code(
    context: RoleContext, error: Exception, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    class Failing(Scripted):
        def do_work(self) -> int:
            raise error

    role = Failing(context, [])
    assert run(context, lambda _: role) == code
    assert role.log == ["close"]
    assert context.control.load(layout.role_word(NAME, "errors")) == 1
    line = json.loads(capfd.readouterr().err.splitlines()[0])
    assert (line["level"], line["role"], line["pid"]) == ("error", NAME, os.getpid())
    assert str(error) in line["event"] + line.get("exception", "")


def test_loop_read_only_file_system_is_logged_in_one_line(
    context: RoleContext, capfd: pytest.CaptureFixture[str]
) -> None:
    context.paths.own.mkdir(exist_ok=True)
    context = dataclasses.replace(context, io=FaultInjectionIO(fault="open:1:EROFS:sticky"))

    def factory(context: RoleContext) -> Scripted:
        context.io.open(context.paths.progress, write=True)
        raise AssertionError("it can be written")

    assert run(context, factory) == 1
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == [
        "errors are not kept in the store",
        "the store's file system is read-only",
    ]
    for line in lines:
        assert (line["level"], line["role"]) == ("error", NAME)
        assert "Read-only file system" in line["error"]
        assert "exception" not in line


def test_lost_page_is_logged_before_the_next_can_be_lost(context: RoleContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_another(heartbeat: Heartbeat) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Heartbeat, "failed", lose_another)
    with tempfile.TemporaryFile() as trace:
        with pytest.raises(ZeroDivisionError):
            log_lost_page(context.heartbeat, trace.fileno(), "segment: offset 5,000: the file was cut", 1)
        trace.seek(0)
        text = trace.read()
    assert text.startswith(b"segment: offset 5,000: the file was cut\n")
    assert b"Current thread" in text


def test_busy_state_is_kept_for_a_while(context: RoleContext) -> None:
    heartbeat, words = context.heartbeat, context.control
    heartbeat.enter(layout.STATE_RUNNING)
    with heartbeat.busy(layout.STATE_SYNCING):
        assert words.load(layout.role_word(NAME, "state")) == layout.STATE_SYNCING
        since = words.load(layout.role_word(NAME, "state_since_ns"))
    assert words.load(layout.role_word(NAME, "state")) == layout.STATE_RUNNING
    assert words.load(layout.role_word(NAME, "state_since_ns")) >= since


def test_role_waiting_for_disk_has_its_state(context: RoleContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync slower than the heartbeat timeout must not get the role killed."""
    state, said = layout.role_word(NAME, "state"), []
    monkeypatch.setattr(os, "fdatasync", lambda fd: said.append(context.control.load(state)))

    class Saving(Scripted):
        def do_work(self) -> int:
            context.io.write_file_atomically(context.paths.own / "small", b"text")
            said.append(context.control.load(state))
            return super().do_work()

    assert run(context, lambda made: Saving(made, [1])) == 0
    assert said[:2] == [layout.STATE_SYNCING, layout.STATE_RUNNING]


def test_state_changes_are_reported(context: RoleContext) -> None:
    states: list[int] = []
    state = layout.role_word(NAME, "state")
    heartbeat = Heartbeat(context.control, NAME, Clock(), changed=lambda: states.append(context.control.load(state)))
    heartbeat.enter(layout.STATE_STARTING)
    heartbeat.enter(layout.STATE_RUNNING)
    assert states == [layout.STATE_STARTING, layout.STATE_RUNNING]


@pytest.mark.parametrize("kind", ["semaphore", "event"])
def test_sigterm_ends_a_wait_at_once(context: RoleContext, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer sends it while the role sleeps."""
    monkeypatch.setattr(bell_module, "MAX_WAIT_S", 60.0)
    sleeping = layout.role_word(NAME, "sleeping")
    if kind == "semaphore":
        bell = SemaphoreBell(f"/{os.urandom(8).hex()}", context.control.cells, sleeping)
        bell.unlink()
        context = _with_bell(context, bell)

    class Sleeper(Scripted):
        def do_work(self) -> int:
            return 0

        def wait(self, timeout_s: float) -> None:
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            self.context.bell.wait(60.0)

    before = signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    try:
        began = time.monotonic()
        assert run(context, lambda made: Sleeper(made, [])) == 0
        assert time.monotonic() - began < 30
    finally:
        signal.signal(signal.SIGALRM, before)


def test_sighup_reloads_the_settings_file(context: RoleContext) -> None:
    write_settings(IO, context.paths, Options(max_message_size=4321))
    seen: list[int] = []

    class Reloading(Scripted):
        def do_work(self) -> int:
            if not seen:
                os.kill(os.getpid(), signal.SIGHUP)
                return 0
            return super().do_work()

        def reload(self, options: Options) -> None:
            seen.append(options.max_message_size)

    assert run(context, lambda made: Reloading(made, [])) == 0
    assert seen == [4321]


def _with_bell(context: RoleContext, bell: SemaphoreBell) -> RoleContext:
    return dataclasses.replace(context, bells={NAME: bell})
