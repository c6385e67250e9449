"""Supervision of a store's group of processes; see README.md. Imported by `mqproc.cli` only."""

from mqproc.supervisor.detach import detach
from mqproc.supervisor.hooks import GroupContext, Hooks, Outcome, Report, RestartPolicy, Timing, lenient
from mqproc.supervisor.supervise import supervise

__all__ = ["GroupContext", "Hooks", "Outcome", "Report", "RestartPolicy", "Timing", "detach", "lenient", "supervise"]
