"""Asking a running supervisor: one request over `ctl.sock`, one answer.

Small and without numpy, so that `mqproc status` answers at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import time
from typing import Any, Final, NoReturn

import msgspec

from mqproc import control_words
from mqproc.cli.beginning import check_not_beginning
from mqproc.cli.times import SOCKET_WAIT_MAX_S
from mqproc.errors import (
    CorruptStoreError,
    MqprocError,
    NotRunningError,
    ProtocolError,
    RequestTimeoutError,
    StoreAccessError,
    error_from_wire,
)
from mqproc.layout.control import GROUP_RECOVERING
from mqproc.layout.frame import ANSWER, HEADER, HEADER_SIZE, MAGIC, OPERATION_MASK, REFUSAL, encode_header
from mqproc.paths import StorePaths, in_shell
from mqproc.wire.address import connect_path, peer_pid
from mqproc.wire.operations import ANSWERS, Empty, ErrorAnswer, Operation, Options

_REQUEST_ID = 1
_LOOK_AGAIN_S: Final = 0.05


def ask_supervisor(paths: StorePaths, operation: Operation, options: Options | None, timeout_s: float) -> Any:
    """The answer's options. Raises NotRunningError, RequestTimeoutError, or what the supervisor refused with."""
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
    if word & REFUSAL:
        raise _refusal(answer)
    if word != operation | ANSWER:
        raise ProtocolError(f"{paths.root}: the supervisor answered with 0x{word:04X}")
    return msgspec.msgpack.decode(answer, type=ANSWERS[Operation(word & OPERATION_MASK)])


def stop_group(paths: StorePaths, timeout_s: float) -> None:
    """Have the group stop in order; returns when the store's lock is free. Raises as above.

    A supervisor that recovers its store reads no requests. A signal ends it amid that, which the next start repeats.
    """
    deadline = time.monotonic() + timeout_s
    if _is_recovering(paths):
        with _connect(paths, timeout_s) as sock:
            # Whoever listens is the supervisor, whatever the file says of one that may be long gone. It has no pid
            # here where it runs in a container: there it is asked, and answers when it has recovered.
            if pid := peer_pid(sock):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                _await_end(paths, sock, deadline)
                return
    ask_supervisor(paths, Operation.STOP_GROUP, None, timeout_s)


def _is_recovering(paths: StorePaths) -> bool:
    try:
        return control_words.read_words(paths)["group_state"] == GROUP_RECOVERING
    except (NotRunningError, CorruptStoreError):
        # A group outlives its file.
        return False


def check_listening(paths: StorePaths) -> None:
    """Raise NotRunningError when no supervisor has the store; one that recovers it listens, but does not answer yet.

    Nobody connects for that: one that recovers lets nobody in, and those who only looked would fill its queue.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(str(connect_path(paths.socket("ctl"))))
        except (OSError, NotRunningError) as error:
            # Linux tells what kind of socket is at a name only when a process has it.
            if not isinstance(error, OSError) or error.errno != errno.EPROTOTYPE:
                _not_running(paths)


def _connect(paths: StorePaths, timeout_s: float) -> socket.socket:
    """Raises NotRunningError when nobody listens, RequestTimeoutError when too many wait to be let in."""
    deadline = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(min(timeout_s, SOCKET_WAIT_MAX_S))
            sock.connect(str(connect_path(paths.socket("ctl"))))
        except BlockingIOError:
            sock.close()
            if time.monotonic() >= deadline:
                raise RequestTimeoutError(f"{paths.root}: the supervisor let nobody in for {timeout_s:g} s") from None
            time.sleep(_LOOK_AGAIN_S)
        except (OSError, NotRunningError):
            sock.close()
            _not_running(paths)
        else:
            return sock


def _not_running(paths: StorePaths) -> NoReturn:
    _check_reach(paths)
    check_not_beginning(paths)
    raise NotRunningError(
        f"{paths.root}: no group runs on this store; mqproc up --store {in_shell(paths.root)} starts one"
    ) from None


def _check_reach(paths: StorePaths) -> None:
    """Raise StoreAccessError when this user cannot see whether somebody listens."""
    try:
        paths.socket("ctl").lstat()
    except PermissionError as error:
        owner = paths.root.stat().st_uid
        raise StoreAccessError(
            f"{paths.root}: only its owner, user {owner}, may ask whether a group runs: {error.strerror}"
        ) from None
    except FileNotFoundError:
        return


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
    """The connection closes when the store's lock is free. Raises RequestTimeoutError when it is not by then."""
    try:
        _exactly(sock, 1, deadline)
    except TimeoutError:
        raise RequestTimeoutError(f"{paths.root}: the group has not ended yet; it goes on stopping") from None
    except OSError:
        return


def _refusal(options: bytes) -> MqprocError:
    answer = msgspec.msgpack.decode(options, type=ErrorAnswer)
    return error_from_wire(answer.code, answer.message, answer.details)
