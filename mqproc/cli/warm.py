"""`mqproc warm`: what a start would compile is compiled before, while another version's group still runs."""

from __future__ import annotations

import time

import click

from mqproc.cli.commands import Command
from mqproc.cli.invocation import Invocation, pass_invocation

NOTHING_KEPT = 1


@click.command(cls=Command)
@pass_invocation
def warm(invocation: Invocation) -> int:
    """Compile what this version needs, so that no start waits for it.

    The first start of a version on a machine takes up to a minute or two longer than others, since it compiles. Do it
    beforehand: after an upgrade, before the group of the version before is stopped; in an image, when it is built. The
    exit code is 1 where nothing that is compiled can be kept.
    """
    from mqproc.cli import warm_kernels

    was_filled, began = warm_kernels.is_filled(), time.perf_counter()
    if not was_filled:
        invocation.out.note("compiling")
    warm_kernels.make_ready()
    seconds, kept = time.perf_counter() - began, warm_kernels.are_kept()
    if invocation.out.is_json:
        invocation.out.document({"compiled": not was_filled, "kept": kept, "seconds": round(seconds, 3)})
    elif was_filled:
        invocation.out.note("all is compiled already")
    else:
        invocation.out.note(
            f"compiled in {seconds:.0f} s" + ("" if kept else f", and not kept: {warm_kernels.NOT_KEPT}")
        )
    return 0 if kept else NOTHING_KEPT
