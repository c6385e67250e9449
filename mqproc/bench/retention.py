"""`mqproc bench retention`: what single sends pay while full segments are deleted beside them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Final

from mqproc.bench.clients import produce
from mqproc.bench.modes import load
from mqproc.bench.runs import Bench, Result, Run, Settings
from mqproc.errors import RequestTimeoutError
from mqproc.io import StoreIO
from mqproc.store.retention import request as retention_request

OWN_SETTINGS: Final = (
    # Nothing goes by itself, and what is asked for may go as soon as it is written.
    "delete_when=4",
    "file_reserved_time=1000",
    "clean_file_forcibly_enable=false",
    "disk_max_used_space_ratio=99",
    "flush_consume_queue_thorough_interval=1000",
    "flush_commit_log_thorough_interval=1000",
)
_FILL_BODY: Final = 4096
_MARKS_S: Final = 120.0
_DELETION_S: Final = 600.0
_MARKS: Final = ("commitlog_mark", "cq_synced", "index_synced")


def retention(bench: Bench, settings: Settings, fill_bytes: int) -> dict[str, Any]:
    """Fill the log, send single messages, then send again while all full segments go; compares the latencies."""
    shape = replace(settings.shape, batch=1, in_flight=1)
    bench.create_topics(shape.topics, shape.queues)
    load(bench, replace(shape, size=_FILL_BODY, keys=1), fill_bytes // _FILL_BODY)
    bench.await_dispatch()
    single = replace(settings, shape=shape)
    alone = _send(bench, single)
    settings.say("without deletion: " + alone.figures.line("sent"))
    _await_marks(bench)
    beside = _send_while_deleting(bench, single)
    settings.say("with deletion: " + beside.figures.line("sent"))
    before, after = beside.words_before, beside.words_after
    ratios = {
        f"p{percentile:g}": round(with_it / max(without, 1e-9), 2)
        for percentile, with_it, without in zip(
            (50, 95, 99, 99.9), beside.figures.percentiles_us, alone.figures.percentiles_us, strict=True
        )
    }
    return {
        "without_deletion": alone.to_json(),
        "with_deletion": beside.to_json(),
        "latency_ratios": ratios,
        "deleted_segments": after["retention_segments"] - before["retention_segments"],
        "deleted_bytes": after["retention_bytes"] - before["retention_bytes"],
    }


def _send(bench: Bench, settings: Settings) -> Result:
    starts = [(produce, (bench.store, settings.shape)) for _ in range(settings.producers)]
    with Run(bench, starts, settings) as run:
        return run.measure("sent", settings.shape.size)


def _send_while_deleting(bench: Bench, settings: Settings) -> Result:
    """Measured from the request to the moment at which the last byte is free."""
    answered = bench.words()["retention_answered"]

    def ask() -> None:
        retention_request.ask(StoreIO(), bench.paths, 0)

    def is_done() -> bool:
        words = bench.words()
        return words["retention_answered"] > answered and words["retention_pending_bytes"] == 0

    starts = [(produce, (bench.store, settings.shape)) for _ in range(settings.producers)]
    with Run(bench, starts, replace(settings, seconds=_DELETION_S, messages=0)) as run:
        return run.measure("sent", settings.shape.size, at_begin=ask, until=is_done)


def _await_marks(bench: Bench) -> None:
    """Until every mark has passed what is written now: else they would hold segments back."""
    written = bench.words()["written"]
    deadline = time.monotonic() + _MARKS_S
    while min(bench.words()[mark] for mark in _MARKS) < written:
        if time.monotonic() > deadline:
            raise RequestTimeoutError(f"the durable marks have not reached {written:,} in {_MARKS_S:g} s")
        time.sleep(0.05)
