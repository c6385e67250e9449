"""Keeping a store's group of processes alive; see README.md here. Only `mqproc.cli` imports this package."""

from mqproc.supervisor.detach import detach
from mqproc.supervisor.hooks import GroupContext, Hooks, Outcome, Report, RestartPolicy, Timing, lenient
from mqproc.supervisor.supervise import supervise

__all__ = ["GroupContext", "Hooks", "Outcome", "Report", "RestartPolicy", "Timing", "detach", "lenient", "supervise"]
