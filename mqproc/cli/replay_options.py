"""Options of `mqproc replay` and of `mqproc spark replay`: where messages go once more, and how fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from mqproc.cli.commands import Rate
from mqproc.cli.completing import complete_topic


def replay_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `to` and `rate`, in messages a second, 0 for no limit."""
    for option in (
        click.option("--rate", type=Rate(0), default=0.0, metavar="N", help="Messages a second.  [no limit]"),
        click.option(
            "--to",
            required=True,
            metavar="TOPIC",
            shell_complete=complete_topic,
            help="Topic to send them to; made when missing.",
        ),
    ):
        function = option(function)
    return function
