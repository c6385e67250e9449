"""Replays for asyncio: the synchronous one in a thread, since it does little but wait for one answer at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from mqproc.client.core import Time
from mqproc.client.replay import Replay, ReplayPosition, ReplayProgress, ReplaySource, begin_of
from mqproc.client.retry import RetryPolicy
from mqproc.client.sync import Client
from mqproc.message import Filter


class _Stopped(Exception):
    """The task that waits for the thread was cancelled."""


class AsyncReplays:
    """`AsyncClient.replay`."""

    store: Path
    timeout_s: float
    retry: RetryPolicy

    async def replay(
        self,
        topic: str,
        to: str,
        begin: Time = None,
        end: Time = None,
        *,
        key: str = "",
        filter: Filter | None = None,
        rate: float = 0.0,
        name: str = "",
        position: ReplayPosition | None = None,
        told: Callable[[ReplayProgress], None] | None = None,
    ) -> ReplayProgress:
        """As `Client.replay`; `told` is called in the event loop. Cancelled, it ends after the next answer."""
        begin_of(position, told)
        source = ReplaySource(topic, begin, end, key, filter)
        loop, stopped = asyncio.get_running_loop(), threading.Event()

        def tell(progress: ReplayProgress) -> None:
            if stopped.is_set():
                raise _Stopped
            if told is not None:
                loop.call_soon_threadsafe(told, progress)

        def run() -> ReplayProgress:
            with Client(self.store, timeout=self.timeout_s, retry=self.retry) as client:
                return Replay(client, source, to, name=name, rate=rate).run(position, tell)

        try:
            return await asyncio.to_thread(run)
        except asyncio.CancelledError:
            stopped.set()
            raise
