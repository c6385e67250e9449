"""`mqproc up`, `down`, `restart`, `run`, `status`: the group of processes on one store."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import math
import os
import signal
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from mqproc.cli.admin.supervisor_client import (
    DOWN_TIMEOUT_S,
    StartLock,
    ask_supervisor,
    check_listening,
    stop_group,
)
from mqproc.cli.options import Invocation, command
from mqproc.cli.output import Output, encode_json, output_columns
from mqproc.config.options import Options, Profile
from mqproc.config.parse import environment_warnings
from mqproc.errors import NotRunningError, StoreAccessError, StoreLockedError
from mqproc.io.store_io import StoreIO
from mqproc.ipc import control_words
from mqproc.ipc.health import Problem, group_health, not_offered, readiness, recovery_progress
from mqproc.layout import control as layout
from mqproc.paths import StorePaths, check_may_be_store, existing_folder, shell_quoted
from mqproc.store.access import default_profile
from mqproc.util.procfs import process_usage
from mqproc.util.progress import show_progress
from mqproc.util.units import format_bytes, format_duration, now_ms
from mqproc.wire.operations import Operation, RoleRequest, RunAnswer, RunRequest, StatusAnswer

if TYPE_CHECKING:
    from mqproc.ipc.control import Control
    from mqproc.supervisor import GroupContext, Outcome, Report
    from mqproc.supervisor.hooks import Hooks

# Long enough for a debugger session, and a valid timeout for a socket.
RUN_TIMEOUT_S = 7 * 24 * 3600.0
_ROLE = click.Choice(layout.ROLES)
_ROLE_COLUMNS = output_columns(
    "role, state, pid:number, restarts:count, uptime_s:number:up, cpu_percent:number:cpu %", "pss_bytes:bytes:memory"
)
EXIT_NOT_READY = 1
EXIT_NOT_CLEAN = 1


@command()
@click.option("--detach", is_flag=True, help="Run in the background, and return when the group is ready.")
@click.option("--ignore-kvstore", is_flag=True, help="Start without state that RocketMQ keeps in RocksDB.")
@click.option(
    "--profile",
    type=click.Choice([each.value for each in Profile]),
    help="File sizes of a new store: segments of 1 GiB (server) or 64 MiB (embedded).  [default: server]",
)
@click.option("--force", is_flag=True, help="Make a store in a folder that holds other files.")
@click.option("--opened", is_flag=True, hidden=True, help="The last user of mqproc.open stops the group.")
def up(
    invocation: Invocation, detach: bool, ignore_kvstore: bool, opened: bool, force: bool, profile: str | None
) -> int:
    """Start a group on a store and stay in the foreground.

    Prints one line per change of state. The store's folder is created if missing; one that holds other files and no
    store is refused without --force.

    Ctrl-C and SIGTERM stop the group in order; a second Ctrl-C shortens the wait. SIGHUP reloads the options; at a
    terminal, where it means that the terminal was closed, it stops the group. SIGUSR1 reopens the log file of --detach.
    With --detach, --timeout and Ctrl-C end the wait only; the start continues. While the first start on a machine
    compiles kernels, standard error shows how many are left.

    A store where RocketMQ keeps POP check points (kvStore), transactions or timed messages in RocksDB is refused;
    --ignore-kvstore starts it without them, as does the option ignore_kvstore.
    """
    if ignore_kvstore:
        invocation.set_.append("ignore_kvstore=true")
    if profile:
        invocation.set_.append(f"profile={profile}")
    paths = invocation.paths_to_start()
    invocation.default_profile = default_profile(StoreIO(), paths, Profile.EMBEDDED if opened else Profile.SERVER)
    try:
        check_may_be_store(paths)
    except StoreAccessError as error:
        if not force:
            raise StoreAccessError(f"{error}; --force makes a store here") from None
    with contextlib.closing(StartLock(paths)) as start_lock:
        outcome = start_group(
            paths,
            invocation.options,
            _reporter(invocation.out),
            detach=detach,
            opened=opened,
            listening=start_lock.close,
            timeout_s=invocation.timeout_or(math.inf),
            start_s=invocation.start_s,
        )
    if outcome.exit_code and outcome.reason:
        invocation.out.note(f"mqproc: {outcome.reason}")
    return outcome.exit_code


def _reporter(out: Output) -> Report:
    from mqproc.roles.role_log import LineStream

    stream = LineStream(out.stream)

    def report(line: str) -> None:
        if out.is_json:
            line = encode_json({"ts_ms": now_ms(), "event": line})
        elif out.is_terminal:
            line = f"{time.strftime('%H:%M:%S')} {line}"
        stream.write(out.printable(line) + "\n")

    return report


def start_group(
    paths: StorePaths,
    load_options: Callable[[], Options],
    report: Report,
    *,
    detach: bool,
    opened: bool,
    listening: Callable[[], None],
    timeout_s: float,
    start_s: float,
) -> Outcome:
    """Run a group here until it ends, or in the background until it is ready.

    The wait ends `timeout_s` after `start_s`, in monotonic seconds. The supervisor calls `listening` when it accepts
    requests. `opened`: the group was started by `mqproc.open`.
    """
    # Numpy must not start threads, as the supervisor forks.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Importing numba and the kernels takes a second, so only a start does it. Modules are many objects and little
    # garbage: without the collector the imports take a sixth less.
    gc.disable()
    from mqproc.cli.admin.engine_hooks import engine_hooks
    from mqproc.roles.registry import SPECS
    from mqproc.roles.role import writer_cpus
    from mqproc.roles.role_log import log_python_messages, never_wait_for_readers
    from mqproc.store.recovery.recovery import adopt_sizes
    from mqproc.store.topics import check_queue_limit
    from mqproc.supervisor import detach as run_detached
    from mqproc.supervisor import supervise

    gc.enable()

    if not detach:
        never_wait_for_readers()
    for line in environment_warnings(os.environ):
        report(line)
    io = StoreIO()
    options = adopt_sizes(io, paths, load_options(), report)
    # Raise ConfigurationError here, before kernels are compiled and the writer fails to boot.
    check_queue_limit(io, paths, options.max_queues)
    writer_cpus(options, frozenset(os.sched_getaffinity(0)))
    if refusal := options.disk_refusal(*io.disk_usage(existing_folder(paths.root))):
        report(f"sends will be refused: {refusal}")

    def run(report: Report, ready: Callable[[], None], progress: Report = show_progress) -> Outcome:
        def on_ready(control: Control) -> None:
            # The monitor has tried to bind its port by now; it keeps trying.
            if not control.load(layout.MONITOR_PORT):
                report(not_offered(options))
            ready()

        hooks = engine_hooks(progress)
        hooks = _add_usage_hooks(hooks, paths, report, listening) if opened else _call_on_warm(hooks, listening)
        hooks = replace(hooks, reload=lambda: adopt_sizes(io, paths, load_options(), report))
        try:
            return supervise(paths, options, SPECS, hooks, report=report, ready=on_ready)
        except StoreLockedError as error:
            place = f"--store {shell_quoted(paths.root)}"
            hint = f"mqproc status {place} shows a running group, mqproc down {place} stops it"
            raise StoreLockedError(f"{error}; {hint}") from None

    if not detach:
        log_python_messages()
        return run(report, lambda: None)
    return run_detached(run, paths, report, show_progress, timeout_s=timeout_s, began_s=start_s)


def _call_on_warm(hooks: Hooks, call: Callable[[], None]) -> Hooks:
    """Call a function before the kernels are loaded, when the supervisor accepts requests."""

    def warm(context: GroupContext) -> None:
        call()
        hooks.warm(context)

    return replace(hooks, warm=warm)


def _add_usage_hooks(hooks: Hooks, paths: StorePaths, report: Report, listening: Callable[[], None]) -> Hooks:
    """Stop a group that `mqproc.open` started when its last user has gone."""
    from mqproc.ipc.usage_lock import IdleWatch, mark_stoppable_by_last_user

    idle = IdleWatch(paths)

    def on_listening() -> None:
        listening()
        mark_stoppable_by_last_user(paths)

    def watch() -> None:
        hooks.watch()
        if idle.unused_too_long():
            report("the group that mqproc.open started has no users any more")
            os.kill(os.getpid(), signal.SIGTERM)

    return replace(_call_on_warm(hooks, on_listening), watch=watch)


@command()
def down(invocation: Invocation) -> int:
    """Stop the group in order.

    Returns when all data is durable and the store's lock is free. Exit code 1 if the stop was not clean, as when the
    disk takes no more writes: the reasons are shown, and the next start recovers. A running recovery is interrupted;
    the next start repeats it. --timeout ends the wait only; the group continues to stop.
    """
    started = time.monotonic()
    timeout_s = invocation.timeout_or(DOWN_TIMEOUT_S)
    problems = stop_group(invocation.existing_paths(), timeout_s)
    took_s = time.monotonic() - started
    document = {"stopped": True, "clean": not problems, "problems": problems, "seconds": round(took_s, 3)}
    how = f", not cleanly: {'; '.join(problems)}; the next start recovers" if problems else ""
    invocation.out.result(document, f"stopped in {format_duration(took_s)}{how}")
    return EXIT_NOT_CLEAN if problems else 0


@command()
@click.argument("role", type=_ROLE, metavar="ROLE")
def restart(invocation: Invocation, role: str) -> None:
    """Restart one role.

    ROLE is one of those that `mqproc status` shows, except supervisor and template. The role stops in order; the
    command returns when it is ready again.
    """
    started = time.monotonic()
    ask_supervisor(invocation.existing_paths(), Operation.RESTART_ROLE, RoleRequest(role), invocation.timeout)
    took_s = time.monotonic() - started
    document = {"role": role, "seconds": round(took_s, 3)}
    invocation.out.result(document, f"{role} restarted in {format_duration(took_s)}")


@command()
@click.argument("role", type=_ROLE, metavar="ROLE")
@click.option("--debug", is_flag=True, help="Enter pdb at this terminal before the role's loop starts.")
def run(invocation: Invocation, role: str, debug: bool) -> int:
    """Run one role at this terminal, for debugging.

    ROLE is as for `mqproc restart`. The supervisor stops the role in order and starts it with this command's standard
    streams; its log is printed here too. Meanwhile the role is not watched, and `mqproc status` shows it as LENT. When
    it exits, or this command is interrupted (Ctrl-C), the supervisor restarts it normally. After pdb's `continue`,
    kill -INT with the role's pid enters pdb again. Exit code 0 if the role exited in order, else 1.
    """
    paths = invocation.existing_paths()
    if not control_words.has_valid_pids(control_words.read_words(paths)):
        where = "in another PID namespace, as in a container"
        raise NotRunningError(f"{paths.root}: the group runs {where}, which has no access to this terminal")
    stdin, stdout, stderr = (f"/proc/{os.getpid()}/fd/{fd}" for fd in range(3))
    request = RunRequest(role, stdin, stdout, stderr, debug)
    for fd in (1, 2):
        # The role opens the same file a second time: only in append mode do both keep each other's lines.
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    timeout_s = invocation.timeout_or(RUN_TIMEOUT_S)
    with _restored_terminal():
        answer: RunAnswer = ask_supervisor(paths, Operation.RUN_ROLE, request, timeout_s)
    text = f"{role} exited here with {answer.ended}; the supervisor has restarted it"
    invocation.out.result({"role": role, "ended": answer.ended, "clean": answer.clean}, text)
    return 0 if answer.clean else 1


@contextlib.contextmanager
def _restored_terminal() -> Iterator[None]:
    """Restore the terminal's settings after a role that was killed at a pdb prompt."""
    if not os.isatty(0):
        yield
        return
    before = termios.tcgetattr(0)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # The terminal is gone.
            if termios.tcgetattr(0) != before:
                termios.tcsetattr(0, termios.TCSADRAIN, before)


@command()
def status(invocation: Invocation) -> int:
    """Show the group's state, the roles, their memory and the log positions.

    The state is ready, or degraded while the group does not do its whole job: then each problem is shown with what to
    do about it. Exit code 0 if the group is ready, 1 if it runs but is not ready, 9 if it does not run.
    """
    paths = invocation.existing_paths()
    options = invocation.store_options(StoreIO(), paths)
    found = group_status(paths, invocation.timeout, options)
    out = invocation.out
    if out.shape == "table":
        _print_status(out, found)
    elif out.shape == "json":
        out.document(found)
    else:
        out.rows("roles", _ROLE_COLUMNS, found["roles"])
    return 0 if found["ready"] else EXIT_NOT_READY


def group_status(paths: StorePaths, timeout_s: float, options: Options | None = None) -> dict[str, Any]:
    """Status from the supervisor, with memory of processes and log positions.

    The state is the same as in /readyz. Positions are None during recovery, as they are unknown.
    """
    answer, words = _answer_and_words(paths, timeout_s)
    roles: list[dict[str, Any]] = [
        {"role": "supervisor", "state": "RUNNING", "pid": answer.pid, "restarts": 0},
        *({"role": role, **values} for role, values in answer.roles.items()),
    ]
    has_valid_pids = control_words.has_valid_pids(words)
    for role in roles:
        role |= process_figures(int(role["pid"]) if has_valid_pids else 0)
    health = group_health(StoreIO(), paths, words, options or Options())
    is_recovering = answer.group == layout.GROUP_NAMES[layout.GROUP_RECOVERING]
    positions = {
        "written_bytes": words["written"],
        "dispatch_behind_bytes": control_words.dispatch_behind_bytes(words),
        "dispatch_behind_ms": health.dispatch_behind_ms,
        "flush_behind_bytes": control_words.flush_behind_bytes(words),
    }
    return {
        "group": answer.group,
        "state": health.state,
        "ready": health.ready,
        "problems": [asdict(problem) for problem in health.problems],
        "warnings": health.warnings,
        "store": answer.store,
        "epoch": answer.epoch,
        "started_ms": answer.started_ms,
        "recovery": recovery_progress(words) if is_recovering else None,
        **(dict.fromkeys(positions) if is_recovering else positions),
        "read_only": control_words.refuses_messages(words),
        "sync_failed": control_words.read_only(words),
        "damage_holes": control_words.damage_holes(words),
        "pss_bytes": sum(role["pss_bytes"] or 0 for role in roles),
        "roles": roles,
    }


def _answer_and_words(paths: StorePaths, timeout_s: float) -> tuple[StatusAnswer, dict[str, int]]:
    """Ask the supervisor; during recovery the control file alone gives the answer."""
    check_listening(paths)
    words = control_words.read_words(paths)
    if words["group_state"] != layout.GROUP_RECOVERING:
        answer = ask_supervisor(paths, Operation.STATUS, None, timeout_s)
        return answer, control_words.read_words(paths)
    roles: dict[str, dict[str, int | str]] = {
        role: {
            "state": layout.name_of(words[f"{role}.supervised"], layout.SUPERVISED_NAMES),
            **{word: words[f"{role}.{word}"] for word in ("pid", "incarnation", "restarts")},
        }
        for role in (layout.TEMPLATE, *layout.ROLES)
    }
    group = layout.GROUP_NAMES[layout.GROUP_RECOVERING]
    started_ms = words["group_started_ms"]
    return StatusAnswer(group, str(paths.root), words["supervisor_pid"], words["epoch"], started_ms, roles), words


def process_figures(pid: int) -> dict[str, Any]:
    """Memory (PSS, which may be added up over a group), CPU and age of a process."""
    usage = process_usage(pid)
    if usage is None:
        return {"pss_bytes": None, "cpu_percent": None, "uptime_s": None}
    return {"pss_bytes": usage.pss_bytes, "cpu_percent": usage.cpu_percent, "uptime_s": round(usage.uptime_s, 1)}


def _positions_text(found: Mapping[str, Any]) -> str:
    if found["written_bytes"] is None:
        return "positions are unknown until recovery has finished"
    sizes = {name: format_bytes(found[f"{name}_bytes"]) for name in ("written", "dispatch_behind", "flush_behind")}
    lag_s = found["dispatch_behind_ms"] / 1000
    return (
        f"written {sizes['written']}, dispatch {sizes['dispatch_behind']}, {lag_s:.1f} s behind, "
        f"flush {sizes['flush_behind']} behind"
    )


def _print_status(out: Output, found: Mapping[str, Any]) -> None:
    since = format_duration((now_ms() - found["started_ms"]) / 1000)
    state = readiness(found["group"], found["state"])
    read_only = ", READ-ONLY" if found["read_only"] else ""
    if found["sync_failed"]:
        read_only += " after a failed sync"
    holes = found["damage_holes"]
    damaged = f", DAMAGED: {holes} ranges of the log, see mqproc/damage.json" if holes else ""
    out.line(f"{found['store']}: {state}{read_only}{damaged}, up {since}, epoch {found['epoch']}")
    out.line(f"{_positions_text(found)}, memory {format_bytes(found['pss_bytes'])}")
    for problem in found["problems"]:
        out.line(f"✗ {Problem(**problem)}")
    for warning in found["warnings"]:
        out.line(f"! {warning}")
    out.line("")
    rows = [
        role | {"uptime_s": None if role["uptime_s"] is None else format_duration(role["uptime_s"])}
        for role in found["roles"]
    ]
    out.rows("roles", _ROLE_COLUMNS, rows)
