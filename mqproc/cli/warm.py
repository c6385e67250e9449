"""`mqproc warm`: what a start would compile is compiled before, while another version's group still runs."""

from __future__ import annotations

import time
from typing import Any

import click

from mqproc.cli.commands import Command
from mqproc.cli.invocation import Invocation, pass_invocation

NOTHING_KEPT = 1


@click.command(cls=Command)
@click.option("--spark", is_flag=True, help="And have Java keep Spark's classes: 200 MB, by which jobs start sooner.")
@pass_invocation
def warm(invocation: Invocation, /, spark: bool) -> int:
    """Compile what this version needs, so that no start waits for it.

    The first start of a version on a machine takes up to a minute or two longer than others, since it compiles. Do it
    beforehand: after an upgrade, before the group of the version before is stopped; in an image, when it is built. The
    exit code is 1 where nothing that is compiled can be kept.

    With --spark a session is started as well, and what Java reads of Spark is kept in a file, beside what is compiled
    or in ~/.cache/mqproc: each start of `mqproc spark` and of a `local_session` takes a third less from then on. It is
    for the Java and the Spark of now; with others, start this command again.
    """
    from mqproc.cli import warm_kernels

    was_filled, began = warm_kernels.is_filled(), time.perf_counter()
    if not was_filled:
        invocation.out.note("compiling")
    warm_kernels.make_ready()
    seconds, kept = time.perf_counter() - began, warm_kernels.are_kept()
    if was_filled:
        invocation.out.note("all is compiled already")
    else:
        invocation.out.note(
            f"compiled in {seconds:.0f} s" + ("" if kept else f", and not kept: {warm_kernels.NOT_KEPT}")
        )
    document: dict[str, Any] = {"compiled": not was_filled, "kept": kept, "seconds": round(seconds, 3)}
    if spark:
        document["spark"] = _warm_spark(invocation)
    if invocation.out.is_json:
        invocation.out.document(document)
    return 0 if kept else NOTHING_KEPT


def _warm_spark(invocation: Invocation) -> dict[str, Any]:
    from mqproc.cli import warm_spark

    began, there = time.perf_counter(), warm_spark.kept_classes()
    if there is None:
        invocation.out.note("having Java keep Spark's classes, which takes a minute or two")
    archive = there or warm_spark.keep_classes()
    seconds, size = time.perf_counter() - began, archive.stat().st_size
    how = "already" if there else f"since now, after {seconds:.0f} s"
    invocation.out.note(f"{archive} keeps Spark's classes {how}: {size // 1_000_000} MB")
    return {"made": there is None, "file": str(archive), "bytes": size, "seconds": round(seconds, 3)}
