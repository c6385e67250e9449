"""What a shell completes behind the names of commands and options: topics, consumer groups, options of the engine.

Names come from the store's settings files, so nothing need run. What cannot be read completes to nothing: a shell has
no place for errors.
"""

from __future__ import annotations

import click

from mqproc.cli.invocation import Invocation
from mqproc.config import FIELDS
from mqproc.errors import MqprocError
from mqproc.io import StoreIO
from mqproc.paths import StorePaths


def complete_topic(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Topics of the store that the line names."""
    return _names_in(ctx, incomplete, "topicConfigTable")


def complete_group(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Consumer groups of the store that the line names."""
    return _names_in(ctx, incomplete, "subscriptionGroupTable")


def complete_setting(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """NAME= of the engine's options."""
    return [f"{name}=" for name in FIELDS if name.startswith(incomplete)]


def complete_option(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of the engine's options."""
    return [name for name in FIELDS if name.startswith(incomplete)]


def _names_in(ctx: click.Context, incomplete: str, table: str) -> list[str]:
    from mqproc.store import rocketmq_json

    try:
        store, _ = ctx.ensure_object(Invocation).find_store()
        if store is None:
            return []
        paths = StorePaths(store)
        file = paths.topics if table == "topicConfigTable" else paths.subscription_groups
        value, _ = rocketmq_json.load(StoreIO(), file)
        return sorted(name for name in (value or {}).get(table, {}) if name.startswith(incomplete))
    except (MqprocError, click.ClickException, OSError, AttributeError):
        return []
