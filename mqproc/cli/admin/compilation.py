"""Compilation of kernels in child processes, one for each processor, at most four.

    modules ── pipe ──▶ child: warms module after module; each kernel is cached as soon as it is compiled
    number of each module that is done ◀── pipe

Memory that the compiler uses would stay in the supervisor and in every forked role. Children of several groups wait for
each other's kernels (`cache.take_turns`) and compile each once.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final, NoReturn

from setproctitle import setproctitle, setthreadtitle

from mqproc.kernels.jit import cache
from mqproc.roles.role_log import get_logger
from mqproc.supervisor import signals
from mqproc.supervisor.template import close_other_descriptors
from mqproc.util.signals import deferred_signals

_CHILDREN_MAX: Final = 4
_READ_MAX: Final = 256
LOW_PRIORITY: Final = 10
"""Niceness of the compilation while a group serves."""


class Compilation:
    """Children that compile modules into a folder, the first `urgent` ones at normal priority.

    They end with this process.
    """

    def __init__(self, folder: Path, modules: Sequence[ModuleType], urgent: int) -> None:
        self.left = set(range(len(modules)))
        """Numbers of the modules that are not compiled yet."""
        self._folder, self._modules, self._urgent = folder, modules, urgent
        self._children: list[int] = []  # Descriptors: the supervisor may reap them first.
        self._done_fd = -1

    def start(self) -> None:
        """Fork the children. Raises OSError without a free descriptor."""
        self._done_fd, done_fd = os.pipe()
        work_fd, queue_fd = os.pipe()
        os.write(queue_fd, bytes(self.left))
        os.close(queue_fd)
        try:
            parent = os.getpid()
            for _ in range(min(len(os.sched_getaffinity(0)), _CHILDREN_MAX)):
                # Python drops the exception of a handler, as for Ctrl-C, that runs within its hooks around a fork.
                with deferred_signals(forking=True):
                    child = os.fork()
                    if child == 0:
                        _run_child(parent, self._folder, self._modules, self._urgent, work_fd, done_fd)
                    self._children.append(os.pidfd_open(child))
        except OSError:
            pass  # No process can be created: those that exist do the work.
        except BaseException:
            self.close()
            raise
        finally:
            os.close(work_fd)
            os.close(done_fd)

    @property
    def is_urgent(self) -> bool:
        """Whether urgent modules are left."""
        return any(number < self._urgent for number in self.left)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a module; False when all children have ended, with modules left if one failed."""
        poll = select.poll()
        poll.register(self._done_fd, select.POLLIN)
        if not poll.poll(1000 * timeout_s):
            return True
        done = os.read(self._done_fd, _READ_MAX)
        self.left.difference_update(done)
        return bool(done)

    def close(self) -> None:
        """End the children."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                signal.pidfd_send_signal(child, signal.SIGKILL)
                os.waitid(os.P_PIDFD, child, os.WEXITED)
            os.close(child)
        self._children.clear()
        if self._done_fd >= 0:
            os.close(self._done_fd)
            self._done_fd = -1


def _run_child(
    parent: int, folder: Path, modules: Sequence[ModuleType], urgent: int, work_fd: int, done_fd: int
) -> NoReturn:
    status = 1
    try:
        signals.die_with_parent()
        if os.getppid() == parent:
            os.setsid()  # Ctrl-C concerns the parent only.
            signals.reset_in_child()
            close_other_descriptors({work_fd, done_fd})
            setproctitle("mqproc: compiler")
            setthreadtitle("mqproc:compiler")
            gc.freeze()
            gc.disable()  # A tenth of the time. The process does not live long.
            with contextlib.suppress(OSError):  # Without turns a kernel may be compiled twice.
                cache.take_turns(folder)
            while taken := os.read(work_fd, 1):
                if taken[0] >= urgent:
                    os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), LOW_PRIORITY))
                modules[taken[0]].warm()
                if errors := cache.write_errors():
                    get_logger().error("compiled kernels cannot be kept", error=errors[0])
                    break
                os.write(done_fd, taken)
            else:
                status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)
