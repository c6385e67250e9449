"""`--tag` and `--sql`: the two ways to choose messages, the same for every command that reads a topic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from mqproc.message import Filter, SqlFilter, TagFilter

F = TypeVar("F", bound=Callable[..., Any])


def filter_options(function: F) -> F:
    """Adds the options; the command gets `tags` and `sql`."""
    function = click.option(
        "--sql", default="", metavar="EXPR", help="Only by these properties: SQL92, price > 10 AND region IS NOT NULL."
    )(function)
    return click.option("--tag", "tags", default="", metavar="EXPR", help="Only these tags: a || b.")(function)


def filter_of(tags: str, sql: str) -> Filter | None:
    """The filter that the options ask for, None for all messages."""
    if tags and sql:
        raise click.UsageError("--tag and --sql do not go together: TAGS is a property too, --sql \"TAGS = 'a'\"")
    if sql:
        return SqlFilter(sql)
    return TagFilter(tags) if tags else None
