"""Client of the supervisor: requests over `ctl.sock`, background start, stop, start lock.

It does not import numpy, so that `mqproc status` answers quickly.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from mqproc.errors import (
    CorruptStoreError,
    NotRunningError,
    ProtocolError,
    RequestTimeoutError,
    StartError,
    StoreAccessError,
    error_from_wire,
)
from mqproc.ipc import control_words
from mqproc.layout.control import GROUP_RECOVERING
from mqproc.layout.frame import ANSWER, HEADER, HEADER_SIZE, MAGIC, REFUSAL, encode_header
from mqproc.paths import StorePaths, check_may_be_store, shell_quoted
from mqproc.util.progress import PROGRESS, read_lines, show_progress
from mqproc.util.signals import deferred_signals
from mqproc.wire.address import connect, peer_pid
from mqproc.wire.operations import ANSWERS, UNDECODABLE, Empty, ErrorAnswer, FrameOptions, Operation, StopAnswer

# An orderly stop writes and syncs all dirty data.
DOWN_TIMEOUT_S: Final = 120.0
# 23 days: the limit of a wait at a socket, whose milliseconds poll keeps in 32 bits.
SOCKET_WAIT_MAX_S: Final = 2_000_000.0
_REQUEST_ID: Final = 1
_RETRY_S: Final = 0.05


class StartLock:
    """Shows that a group is starting on a store, until closed.

    `mqproc up` loads its program for about a second before it takes the store's lock, and the store's folder may not
    exist yet. Meanwhile it listens at an abstract socket address derived from the store's path. The kernel frees the
    address when the process ends.
    """

    def __init__(self, paths: StorePaths) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # With two starts at once one bound address is enough; the store's lock decides between them.
        with contextlib.suppress(OSError):
            self._socket.bind(_start_address(paths))
            self._socket.listen()

    def close(self) -> None:
        """Release it: the supervisor answers requests now, or the start has failed."""
        self._socket.close()


def check_not_starting(paths: StorePaths) -> None:
    """Raise NotRunningError if a group is starting and does not answer requests yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(_start_address(paths))
        except BlockingIOError:
            pass  # The backlog is full.
        except OSError:
            return
    raise NotRunningError(f"{paths.root}: mqproc up is starting here and still loads its program; ask again")


def _start_address(paths: StorePaths) -> str:
    """The store's abstract socket address, the same for every path to the store."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(paths.root))).hexdigest()
    return f"\0mqproc-up:{name}"


# Requests


def ask_supervisor(paths: StorePaths, operation: Operation, options: FrameOptions | None, timeout_s: float) -> Any:
    """Send one request and return the decoded answer.

    Raises NotRunningError, RequestTimeoutError, or the error of the supervisor's refusal.
    """
    deadline = time.monotonic() + timeout_s
    with _connect(paths, timeout_s) as sock:
        request = msgspec.msgpack.encode(options or Empty())
        sock.sendall(encode_header(operation, _REQUEST_ID, len(request), 0) + request)
        try:
            word, answer = _receive(sock, deadline)
        except TimeoutError:
            raise RequestTimeoutError(f"{paths.root}: the supervisor did not answer in {timeout_s:g} s") from None
        except OSError as error:
            raise NotRunningError(f"{paths.root}: the supervisor went away: {error}") from None
        if operation is Operation.STOP_GROUP and not word & REFUSAL:
            _await_end(paths, sock, deadline)
    if word not in (operation | ANSWER, operation | ANSWER | REFUSAL):
        raise ProtocolError(f"{paths.root}: the supervisor answered with 0x{word:04X}")
    try:
        if word & REFUSAL:
            refusal = msgspec.msgpack.decode(answer, type=ErrorAnswer)
            raise error_from_wire(refusal.code, refusal.message, refusal.details)
        return msgspec.msgpack.decode(answer, type=ANSWERS[operation])
    except UNDECODABLE as error:
        raise ProtocolError(f"{paths.root}: the supervisor's answer cannot be read: {error}") from None


def stop_group(paths: StorePaths, timeout_s: float) -> list[str]:
    """Stop the group and wait for the store's lock; returns the reasons of an unclean stop.

    Raises as `ask_supervisor`.

    A supervisor in recovery reads no requests, so it gets SIGTERM; the next start repeats the recovery.
    """
    deadline = time.monotonic() + timeout_s
    if _is_recovering(paths):
        with _connect(paths, timeout_s) as sock:
            # The pid comes from the socket, as the control file may be an old one. A supervisor in another PID
            # namespace has no pid here: it gets a request, and answers after recovery.
            if pid := peer_pid(sock):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                _await_end(paths, sock, deadline)
                return []
    answer: StopAnswer = ask_supervisor(paths, Operation.STOP_GROUP, None, timeout_s)
    return answer.problems


def _is_recovering(paths: StorePaths) -> bool:
    try:
        return control_words.read_words(paths)["group_state"] == GROUP_RECOVERING
    except (NotRunningError, CorruptStoreError, PermissionError):
        # A group can run although its control file was removed. Another user's supervisor refuses the connection.
        return False


def check_listening(paths: StorePaths) -> None:
    """Raise NotRunningError if no supervisor listens.

    One in recovery listens, but does not answer yet.

    This makes no connection: a supervisor in recovery accepts none, and the probes would fill its backlog.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            connect(sock, paths.socket("ctl"))
        except OSError as error:
            # A process is bound to this address with a stream socket.
            if error.errno != errno.EPROTOTYPE:
                _not_running(paths, error)


def _connect(paths: StorePaths, timeout_s: float) -> socket.socket:
    """Raise NotRunningError without a listener, RequestTimeoutError if the backlog is full."""
    deadline = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(min(timeout_s, SOCKET_WAIT_MAX_S))
            connect(sock, paths.socket("ctl"))
        except BlockingIOError:
            sock.close()
            if time.monotonic() >= deadline:
                raise RequestTimeoutError(
                    f"{paths.root}: the supervisor accepted no connection in {timeout_s:g} s"
                ) from None
            time.sleep(_RETRY_S)
        except OSError as error:
            sock.close()
            _not_running(paths, error)
        else:
            return sock


def _not_running(paths: StorePaths, error: OSError) -> NoReturn:
    """Raise NotRunningError, or StoreAccessError for a folder without store or permission."""
    if isinstance(error, PermissionError):
        owner = paths.root.stat().st_uid
        raise StoreAccessError(
            f"{paths.root}: only its owner, user {owner}, may ask whether a group runs: {error.strerror}"
        ) from None
    check_not_starting(paths)
    check_may_be_store(paths)
    raise NotRunningError(
        f"{paths.root}: no group runs on this store; mqproc up --store {shell_quoted(paths.root)} starts one"
    ) from None


def _receive(sock: socket.socket, deadline: float) -> tuple[int, bytes]:
    magic, _, word, _, options_size, _, payload_size = HEADER.unpack(_exactly(sock, HEADER_SIZE, deadline))
    if magic != MAGIC:
        raise ProtocolError("the supervisor's socket speaks another protocol")
    options = _exactly(sock, options_size, deadline)
    _exactly(sock, payload_size, deadline)
    return word, options


def _exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        sock.settimeout(min(left_s, SOCKET_WAIT_MAX_S))
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("connection closed")
        data += piece
    return data


def _await_end(paths: StorePaths, sock: socket.socket, deadline: float) -> None:
    """Wait until the connection closes, with the lock free. Raises RequestTimeoutError."""
    try:
        _exactly(sock, 1, deadline)
    except TimeoutError:
        raise RequestTimeoutError(f"{paths.root}: the group has not stopped yet; it continues to stop") from None
    except OSError:
        return


# A group in the background


def start_detached(store: Path, settings: Sequence[str], config: Path | None, report: Callable[[str], None]) -> None:
    """Start a group with `mqproc up --detach` and wait until it is ready.

    The group shares no memory with this process. `report` gets its lines of output. Raises StartError with its errors.
    """
    command = [sys.executable, "-P", "-m", "mqproc", "up", "--detach", "--store", str(store)]
    command += ["--config", str(config)] if config else []
    for setting in settings:
        command += ["--set", setting]
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as stack:
        with deferred_signals():
            # In a session of its own, so that Ctrl-C reaches this command only.
            child = subprocess.Popen(
                command, stdout=pipe, stderr=pipe, text=True, env=os.environ, start_new_session=True
            )
            stack.enter_context(child)
            stack.enter_context(_stopped_on_interrupt(child, store, report))
        assert child.stdout is not None
        assert child.stderr is not None
        errors = []
        for pipe_name, line in read_lines({"out": child.stdout, "err": child.stderr}, SOCKET_WAIT_MAX_S):
            if pipe_name == "out":
                report(line.rstrip())
            elif line.startswith(PROGRESS):
                show_progress(line)
            else:
                errors.append(line)
        show_progress("")
    if child.returncode != 0:
        text = "\n".join(errors).strip()
        raise StartError(f"{store}: the group did not start: {text or f'exit code {child.returncode}'}")


@contextlib.contextmanager
def _stopped_on_interrupt(child: subprocess.Popen[str], store: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Stop the group again if its start is interrupted, but not another running group."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        try:
            child.communicate(timeout=DOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            report(f"the group is still starting; mqproc down --store {shell_quoted(store)} stops it")
        if child.returncode == 0:
            stop(store)
        raise


def stop(store: Path) -> None:
    """Stop a group in order if it runs."""
    try:
        stop_group(StorePaths(store), DOWN_TIMEOUT_S)
    except NotRunningError:
        return


@contextlib.contextmanager
def running_group(
    store: Path, settings: Sequence[str], config: Path | None, report: Callable[[str], None], *, keep: bool = False
) -> Iterator[None]:
    """Run a group for the duration of the block; with `keep` it stays unless the block fails."""
    start_detached(store, settings, config, report)
    finished = False
    try:
        yield
        finished = True
    finally:
        if not (keep and finished):
            stop(store)
