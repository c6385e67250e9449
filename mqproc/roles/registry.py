"""The table of roles: which class runs in which process, with which bell and sockets.

To add a role, write its class by the contract of `role.py`, add a row here, and its words to `layout/control.py`.
"""

from __future__ import annotations

from typing import Final

from mqproc.layout import control
from mqproc.roles.dispatcher import Dispatcher
from mqproc.roles.flushers import CommitLogFlusher, cq_flusher, index_flusher
from mqproc.roles.keeper.role import Keeper
from mqproc.roles.monitor import Monitor
from mqproc.roles.query.role import Query
from mqproc.roles.role import BellKind, RoleSpec, keep_freed_memory
from mqproc.roles.writer.role import Writer

SPECS: Final = (
    RoleSpec(control.WRITER, Writer, BellKind.EVENT, sockets=("writer",)),
    RoleSpec(control.COMMITLOG_FLUSHER, CommitLogFlusher),
    RoleSpec(control.CQ_FLUSHER, cq_flusher),
    RoleSpec(control.INDEX_FLUSHER, index_flusher),
    RoleSpec(control.DISPATCHER, Dispatcher),
    RoleSpec(control.QUERY, Query, BellKind.EVENT, sockets=("query",), prepare=keep_freed_memory, zero_fill=True),
    RoleSpec(control.KEEPER, Keeper),
    RoleSpec(control.MONITOR, Monitor, BellKind.EVENT),
)
