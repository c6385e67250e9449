"""What a flusher does about an error of its storage."""

from __future__ import annotations

from types import TracebackType

from mqproc.io import FailedSyncError
from mqproc.roles.log import get_logger
from mqproc.roles.loop import RoleContext


class FlushErrors:
    """Around a step of a flusher, which goes on living: `with FlushErrors(context): …`.

    A failed sync is logged: it is final, and the control file says so. After another error (no room for a mark, no
    descriptor left) nothing counts as synced, so the next step does it; at the end no step follows, and it is raised.
    """

    def __init__(self, context: RoleContext, *, stopping: bool = False) -> None:
        self._heart = context.heart
        self._stopping = stopping

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, OSError):
            return False
        final = isinstance(error, FailedSyncError)
        if self._stopping and not final:
            return False
        self._heart.failed()
        what = "sync failed, the store is read-only from now on" if final else "flush waits"
        get_logger().error(what, error=str(error))
        return True
