"""`mqproc group`: consumer groups, their members, lag, offsets and dead letters.

Commands that change something show a plan; with `--execute` they do it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import click

from mqproc.cli.message.format import BODIES, to_json, to_row
from mqproc.cli.options import (
    DURATION,
    TIME,
    CommandGroup,
    Invocation,
    command,
    complete_group,
    execute_option,
    queues_option,
    topics_option,
)
from mqproc.cli.output import Output, output_columns
from mqproc.client import Client, Move, ResetTo
from mqproc.client.group_requests import check_read
from mqproc.errors import BadRequestError, GroupNotFoundError, MessageNotFoundError
from mqproc.topic_names import DEAD_LETTER_PREFIX, check_group, reject_system_group
from mqproc.types import GroupInfo, GroupQueue, StoredMessage
from mqproc.util.units import counted, format_duration, now_ms

EXIT_LAGS: Final = 1

_GROUP_COLUMNS = output_columns(
    "group", "members:count", "topics:count", "lag:count", "retry_lag:count:in retry", "waiting_retries:count:waiting"
)
_MEMBER_COLUMNS = output_columns(
    "member_id:text:member, name, queues:count, silent_ms:count:silent ms, pid:number, topics, filter"
)
_QUEUE_COLUMNS = output_columns(
    "topic, queue_id:number:queue, offset:count, max_offset:count:end, lag:count",
    "offset_time_ms:time_ms:next stored, member_id:text:member",
)
_LAG_COLUMNS = output_columns("topic", "lag:count", "oldest_time_ms:time_ms:oldest stored", "behind:text:behind")
_MOVE_COLUMNS = output_columns(
    "topic", "queue_id:number:queue", "before:count", "after:count", "requested:count", "messages:count:again"
)
# A table has the outcome in words, as a negative number next to "again" would be misread.
_MOVES_TABLE = [*_MOVE_COLUMNS[:-2], *output_columns("outcome")]
_CHANGE_COLUMNS = output_columns("setting", "before", "after")


@click.group(cls=CommandGroup)
def group() -> None:
    """Consumer groups: members, lag, offsets, dead letters.

    Exit code 5 if there is no such group. Commands that change something show a plan; with --execute they do it.
    """


def _checked(check: Callable[[str], object]) -> Callable[[click.Context, click.Parameter, str], str]:
    """A callback of a name; an error of `check` is a usage error."""

    def callback(_context: click.Context, _parameter: click.Parameter, name: str) -> str:
        try:
            check(name)
        except BadRequestError as error:
            raise click.BadParameter(str(error)) from None
        return name

    return callback


_existing_group = click.argument("name", metavar="GROUP", shell_complete=complete_group)
# A group that may be created needs a valid name; other existing groups may have any name.
_new_group = click.argument("name", metavar="GROUP", shell_complete=complete_group, callback=_checked(check_group))
_own_group = click.argument(
    "name", metavar="GROUP", shell_complete=complete_group, callback=_checked(reject_system_group)
)


@command("list", group=group)
@click.option("--prefix", default="", shell_complete=complete_group, help="Only names with this prefix.")
def list_(invocation: Invocation, prefix: str) -> None:
    """List groups with their members and lag."""
    with invocation.client() as client:
        found = [each for each in client.groups.all() if each.group.startswith(prefix)]
    invocation.out.rows("groups", _GROUP_COLUMNS, [dataclasses.asdict(each) for each in found])


# Inspect a group


@command(group=group)
@_existing_group
def info(invocation: Invocation, name: str) -> None:
    """Show a group's settings, members, filters of its live consumers, and offsets by queue."""
    with invocation.client() as client:
        found = client.groups.info(name)
    members = [dataclasses.asdict(member) for member in found.members]
    queues = [dataclasses.asdict(queue) | {"lag": queue.lag} for queue in found.queues]
    out = invocation.out
    if out.shape == "json":
        settings = {key: getattr(found, key) for key in _SETTINGS}
        filters = dict(found.filters)
        document = {"group": name, "lag": found.lag, **settings, "filters": filters, "members": members}
        out.document(document | {"queues": queues})
        return
    if out.shape == "table":
        _print_head(out, found)
        if members:
            out.rows("members", _MEMBER_COLUMNS, members)
            out.line("")
    out.rows("queues", _QUEUE_COLUMNS, queues)


_SETTINGS = ("waiting_retries", "generation", "retry_max_times", "retry_queue_nums", "consume_enable")


def _print_head(out: Output, found: GroupInfo) -> None:
    may = "" if found.consume_enable else "; consuming is disabled"
    out.line(
        f"{found.group}: {counted(len(found.members), 'member')}, {counted(found.lag, 'message')} not consumed, "
        f"{found.waiting_retries:,} waiting for a retry, "
        f"dead letters after {counted(found.retry_max_times, 'retry')}{may}"
    )
    for topic, filter in found.filters.items():
        if filter != "*":
            out.line(f"filter in {topic}: {filter}")
    out.line("")


@command(group=group)
@_existing_group
@topics_option
@click.option("--max", "limit", type=click.IntRange(0), metavar="N", help="Exit code 1 if the lag exceeds N messages.")
@click.option("--max-age", type=DURATION, metavar="TIME", help="Exit code 1 if the oldest message is older.")
def lag(invocation: Invocation, name: str, topics: tuple[str, ...], limit: int | None, max_age: float | None) -> int:
    """Show the lag of a group by topic; with limits also for monitoring."""
    with invocation.client() as client:
        found = client.groups.info(name)
    check_read(found, topics)
    queues = [queue for queue in found.queues if not topics or queue.topic in topics]
    rows = lag_rows(queues, now_ms())
    left = sum(queue.lag for queue in queues)
    oldest_ms = max((row["age_ms"] or 0 for row in rows), default=0)
    exceeded = (limit is not None and left > limit) or (max_age is not None and oldest_ms > max_age * 1000)
    invocation.out.rows(
        "topics",
        _LAG_COLUMNS,
        rows,
        group=name,
        lag=left,
        waiting_retries=found.waiting_retries,
        oldest_age_ms=oldest_ms,
        exceeded=exceeded,
    )
    return EXIT_LAGS if exceeded else 0


def lag_rows(queues: Sequence[GroupQueue], at_ms: int) -> list[dict[str, Any]]:
    """A row per topic: lag, and age of the oldest message."""
    queues_of: dict[str, list[GroupQueue]] = {}
    for queue in queues:
        queues_of.setdefault(queue.topic, []).append(queue)
    rows = []
    for topic, of_topic in sorted(queues_of.items()):
        lagging = [queue for queue in of_topic if queue.lag]
        times = [queue.offset_time_ms for queue in lagging if queue.offset_time_ms is not None]
        age_ms = max(0, at_ms - min(times)) if times else None
        rows.append(
            {
                "topic": topic,
                "lag": sum(queue.lag for queue in lagging),
                "oldest_time_ms": min(times, default=None),
                "age_ms": age_ms,
                "behind": None if age_ms is None else format_duration(age_ms / 1000),
            }
        )
    return rows


# Move offsets

_TARGETS = ("--to-earliest", "--to-latest", "--to-offset", "--to-datetime", "--by-duration", "--shift-by")


@command(group=group)
@_new_group
@topics_option
@queues_option
@click.option("--to-earliest", is_flag=True, help="To the first stored message.")
@click.option("--to-latest", is_flag=True, help="After the last message.")
@click.option("--to-offset", type=click.IntRange(0), metavar="N", help="To this offset in every queue.")
@click.option("--to-datetime", type=TIME, metavar="TIME", help="To the first message stored at TIME or later.")
@click.option(
    "--by-duration", type=DURATION, metavar="TIME", help="To the first message stored in the last TIME: 15m, 2h."
)
@click.option("--shift-by", type=int, metavar="N", help="By N messages; a negative N goes back.")
@execute_option
def reset(
    invocation: Invocation,
    name: str,
    topics: tuple[str, ...],
    queues: tuple[int, ...],
    to_earliest: bool,
    to_latest: bool,
    to_offset: int | None,
    to_datetime: int | None,
    by_duration: float | None,
    shift_by: int | None,
    execute: bool,
) -> int:
    """Move a group's offsets: exactly one of --to-…, --by-duration and --shift-by.

    Applies to all queues with committed offsets of the group, or to the named queues. The retry topic keeps its
    messages unless it is named or the target is the latest offset. Members continue from the new offsets at once. A new
    group is created if --topic names its topics.
    """
    with_value = [value is not None for value in (to_offset, to_datetime, by_duration, shift_by)]
    if sum((to_earliest, to_latest, *with_value)) != 1:
        raise click.UsageError(f"give exactly one of {', '.join(_TARGETS[:-1])} and {_TARGETS[-1]}")
    time = to_datetime if by_duration is None else now_ms() - round(by_duration * 1000)
    to = ResetTo(to_earliest, to_latest, to_offset, time, shift_by)
    return _move(invocation, name, execute, lambda client: client.groups.plan_reset(name, to, topics, queues))


@command(group=group)
@_own_group
@topics_option
@execute_option
def skip(invocation: Invocation, name: str, topics: tuple[str, ...], execute: bool) -> int:
    """Skip all messages that a group has not consumed."""
    to = ResetTo(latest=True)
    return _move(invocation, name, execute, lambda client: client.groups.plan_reset(name, to, topics))


@command(group=group)
@click.argument("source", metavar="FROM", shell_complete=complete_group)
@click.argument("target", metavar="TO", callback=_checked(check_group))
@topics_option
@execute_option
def clone(invocation: Invocation, source: str, target: str, topics: tuple[str, ...], execute: bool) -> int:
    """Copy the offsets of group FROM to group TO, which is created if missing."""
    return _move(invocation, target, execute, lambda client: client.groups.plan_clone(source, target, topics))


def _move(
    invocation: Invocation,
    name: str,
    execute: bool,
    plan: Callable[[Client], list[Move]],
) -> int:
    with invocation.client() as client:
        moves = plan(client)
        if execute:
            client.groups.execute(name, moves)
    rows = [dataclasses.asdict(move) | {"messages": move.messages} for move in moves]
    out = invocation.out
    if out.shape != "table":
        out.rows("moves", _MOVE_COLUMNS, rows, group=name, executed=execute)
    elif rows:
        shown = [row | {"outcome": _outcome(move)} for row, move in zip(rows, moves, strict=True)]
        out.rows("moves", _MOVES_TABLE, shown)
    if not out.is_json:
        out.note(_summary(name, moves, execute))
        if count := sum(move.requested is not None for move in moves):
            out.note(f"{counted(count, 'queue')} limited to the first or last offset of the queue")
    return 0 if execute else invocation.plan_exit_code(bool(moves))


def _outcome(move: Move) -> str:
    limited = "" if move.requested is None else f"; {move.requested:,} is outside the queue"
    if move.before is None:
        return f"starts here{limited}"
    outcome = f"{move.messages:,} again" if move.messages > 0 else f"{-move.messages:,} skipped"
    return f"{outcome}{limited}"


def _summary(name: str, moves: Sequence[Move], execute: bool) -> str:
    if not moves:
        return f"{name} is already at these offsets"
    again = sum(max(0, move.messages) for move in moves)
    skipped = sum(max(0, -move.messages) for move in moves)
    what = f"{counted(len(moves), 'queue')}: {counted(again, 'message')} again, {skipped:,} skipped"
    return f"moved {name} in {what}" if execute else f"would move {name} in {what}; --execute does it"


@command(group=group)
@_new_group
@click.option("--retry-max-times", type=click.IntRange(0), metavar="N", help="Dead letter after N retries.")
@click.option("--enable/--disable", "enabled", default=None, help="Allow or forbid consuming.")
@execute_option
def change(invocation: Invocation, name: str, retry_max_times: int | None, enabled: bool | None, execute: bool) -> int:
    """Change a group's settings; the group is created if missing.

    After --disable members lose their queues, and no member joins or receives until --enable.
    """
    settings = {"retry_max_times": retry_max_times, "consume_enable": enabled}
    changes = {setting: value for setting, value in settings.items() if value is not None}
    if not changes:
        raise click.UsageError("give --retry-max-times, --enable or --disable")
    with invocation.client() as client:
        found = None
        with contextlib.suppress(GroupNotFoundError):
            found = client.groups.info(name)
        if execute:
            client.groups.change(name, retry_max_times=retry_max_times, enabled=enabled)
    rows = [
        {"setting": setting, "before": getattr(found, setting, None), "after": value}
        for setting, value in changes.items()
        if found is None or getattr(found, setting) != value
    ]
    out = invocation.out
    if rows or out.shape != "table":
        out.rows("changes", _CHANGE_COLUMNS, rows, group=name, executed=execute)
    if not out.is_json:
        done = f"changed {name}" if execute else f"would change {name}; --execute does it"
        out.note(done if rows else f"{name} already has these settings")
    return 0 if execute else invocation.plan_exit_code(bool(rows))


@command(group=group)
@_own_group
@execute_option
def delete(invocation: Invocation, name: str, execute: bool) -> int:
    """Delete a group with its offsets and retry messages; its dead letters stay.

    Refused while the group has members.
    """
    with invocation.client() as client:
        try:
            found = client.groups.info(name)
        except GroupNotFoundError:
            if execute:  # An interrupted deletion may have left topics.
                client.groups.delete(name)
            raise
        has_dead_letters = bool(client.queues(DEAD_LETTER_PREFIX + name))
        if execute:
            client.groups.delete(name)
    queues = sum(queue.offset is not None for queue in found.queues)
    if execute:
        text = f"deleted group {name}" + (f"; {DEAD_LETTER_PREFIX}{name} stays" if has_dead_letters else "")
    else:
        members = counted(len(found.members), "member")
        condition = f" once it has no members; now it has {members}" if found.members else ""
        text = f"would delete {name} with its offsets in {counted(queues, 'queue')}; --execute does it{condition}"
    document = {"group": name, "queues": queues, "members": len(found.members), "deleted": execute}
    invocation.out.result(document, text)
    return 0 if execute else invocation.plan_exit_code(True)


# Dead letters


EXIT_NOT_ALL: Final = 1
_DEAD_LETTER_COLUMNS = output_columns(
    "queue_offset:number:offset, store_timestamp_ms:time_ms:since, origin_topic:text:topic",
    "origin_message_id:text:message, reconsume_times:number:retries, tag, keys, body",
)


@group.group(cls=CommandGroup)
def dlq() -> None:
    """Dead letters: messages that a group failed to consume too often."""


@command("list", group=dlq)
@_existing_group
@click.option(
    "-n",
    "--count",
    "--max",
    "--limit",
    "count",
    type=click.IntRange(1),
    metavar="N",
    help="At most N, the oldest.  [default: all]",
)
@click.option("--body", type=click.Choice(BODIES), default="text", show_default=True, help="How bodies are shown.")
def list_dead_letters(invocation: Invocation, name: str, count: int | None, body: str) -> None:
    """List a group's dead letters, oldest first. Exit code 5 if there is no such group."""
    out = invocation.out
    with invocation.client() as client:
        letters = itertools.islice(_letters(client, name), count)
        if out.is_json:
            rows = (to_json(letter, body) | _origin(letter) for letter in letters)
            out.rows("dead_letters", _DEAD_LETTER_COLUMNS, rows, group=name)
        else:
            preview = out.shape == "table"
            rows = (to_row(letter, body, preview=preview) | _origin(letter) for letter in letters)
            out.rows("dead_letters", _DEAD_LETTER_COLUMNS, rows)


def _letters(client: Client, name: str) -> Iterator[StoredMessage]:
    client.groups.info(name)  # Raises GroupNotFoundError for a mistyped name.
    return client.groups.dead_letters(name)


def _origin(letter: StoredMessage) -> dict[str, Any]:
    """Topic and id of the original message."""
    return {
        "origin_topic": letter.properties.get("RETRY_TOPIC", letter.topic),
        "origin_message_id": letter.properties.get("ORIGIN_MESSAGE_ID", letter.message_id),
    }


@command(group=dlq)
@_existing_group
@click.option(
    "--offset",
    "offsets",
    multiple=True,
    type=click.IntRange(0),
    help="Only the dead letter at this offset; may be repeated.",
)
@execute_option
def resend(invocation: Invocation, name: str, offsets: tuple[int, ...], execute: bool) -> int:
    """Send dead letters to their group again, as new messages. The dead letters stay.

    Exit code 1 if some could not be sent, 5 for an --offset without a dead letter.
    """
    with invocation.client() as client:
        selected = set(offsets)
        letters = [letter for letter in _letters(client, name) if not selected or letter.queue_offset in selected]
        if missing := selected - {letter.queue_offset for letter in letters}:
            raise MessageNotFoundError(f"group {name} has no dead letter {', '.join(map(str, sorted(missing)))}")
        sent = client.groups.resend(name, *letters) if execute else 0
    found = counted(len(letters), "dead letter")
    plan = f"would send {found} to {name} again; --execute does it" if letters else f"{name} has no dead letters"
    document = {"group": name, "dead_letters": len(letters), "sent": sent, "executed": execute}
    invocation.out.result(document, f"{sent:,} of {found} sent to {name} again" if execute else plan)
    if not execute:
        return invocation.plan_exit_code(bool(letters))
    return 0 if sent == len(letters) else EXIT_NOT_ALL
