"""`mqproc config`: options with their values, sources and meanings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import click

from mqproc.cli.options import CommandGroup, Invocation, command, complete_option
from mqproc.cli.output import output_columns
from mqproc.config.options import FIELDS, rocketmq_name
from mqproc.config.parse import check_supported, environment_warnings, ignored_names, options_from, results_of
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.util.units import exact_bytes

_SHOWN = output_columns("name", "value", "unit", "source:text:set by")
_EXPLAINED = output_columns("name, default, unit, bounds, reload, rocketmq_name:text:in broker.conf, doc:text:meaning")


@click.group(cls=CommandGroup)
def config() -> None:
    """Show, check and explain options.

    The value of an option comes from --set NAME=VALUE, else MQPROC_<NAME>, else the config file, else the default.
    """


@command(group=config)
@click.option("--changed", is_flag=True, help="Only options that differ from the default.")
@click.argument("names", nargs=-1, shell_complete=complete_option)
def show(invocation: Invocation, changed: bool, names: tuple[str, ...]) -> None:
    """Show options with their values and sources."""
    _check_names(names)
    store, source = invocation.named_store()
    rows: list[dict[str, Any]] = []
    if store is not None and not names:
        rows.append({"name": "store", "value": str(store), "unit": "", "source": source})
    for name, setting in invocation.settings().items():
        if (names and name not in names) or (changed and setting.source == "default"):
            continue
        unit = FIELDS[name].metadata["unit"]
        rows.append({"name": name, "value": setting.value, "unit": unit, "source": setting.source})
    out = invocation.out
    out.rows("options", _SHOWN, [_for_table(row) for row in rows] if out.shape == "table" else rows)


def _for_table(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"value": exact_bytes(row["value"]), "unit": ""} if row["unit"] == "bytes" else row


@command(group=config)
def check(invocation: Invocation) -> None:
    """Check the options from all sources; exit code 8 if one is wrong.

    Reports names in a broker.conf that mqproc ignores, and MQPROC_ variables that are not options. A name that nearly
    matches an option is an error, and so is an option that keeps data where mqproc does not read it, or, with a store,
    one that the store's content contradicts.
    """
    _check_all(invocation)
    settings = invocation.settings()
    named = sum(setting.is_explicit for setting in settings.values())
    file = invocation.config_file()
    ignored, warnings = ignored_names(file), environment_warnings(os.environ)
    out = invocation.out
    if out.is_json:
        document = {"options": len(settings), "set": named, "file": file, "ignored": ignored}
        out.document(document | {"warnings": warnings})
        return
    out.line(f"{len(settings)} options are valid, {named} of them set; file: {file or 'none'}")
    if ignored:
        out.line(f"ignored, as mqproc has no such options: {', '.join(ignored)}")
    for line in warnings:
        out.line(line)


def _check_all(invocation: Invocation) -> None:
    """Raise ConfigurationError for all options that are wrong, unsupported or contradicted.

    The named store, if it exists, may contradict them.
    """
    file, valid = invocation.config_file(), {}

    def check_values() -> None:
        valid.update(options_from(invocation.settings()).to_dict())

    def check_store() -> None:
        store, _ = invocation.named_store()
        if valid and store is not None and (paths := StorePaths(store)).consume_queue.exists():
            from mqproc.store.topics import check_queue_limit

            check_queue_limit(StoreIO(), paths, valid["max_queues"])

    results_of(check_values, lambda: check_supported(file, ignore=valid.get("ignore_kvstore", False)), check_store)


@command(group=config)
@click.argument("names", nargs=-1, shell_complete=complete_option)
def doc(invocation: Invocation, names: tuple[str, ...]) -> None:
    """Explain options: default, unit, bounds, name in broker.conf, change without restart."""
    _check_names(names)
    rows = [describe(name) for name in FIELDS if not names or name in names]
    out = invocation.out
    if out.shape != "table":
        out.rows("options", _EXPLAINED, rows)
        return
    expert = [row["name"] for row in rows if FIELDS[row["name"]].metadata["expert"]]
    for row in rows:
        if not names and row["name"] == expert[0]:
            out.line("\nExpert options, which few installations need:\n")
        is_size = row["unit"] == "bytes"
        default = exact_bytes(row["default"]) if is_size else row["default"]
        out.line(f"{row['name']} = {default}" + (f"  ({row['unit']})" if row["unit"] else ""))
        out.line(f"    {row['doc']}")
        bounds = _bounds(row["low"], row["high"], exact_bytes) if is_size else row["bounds"]
        remarks = [f"bounds {bounds}"] if bounds else []
        remarks += ["reloaded without a restart"] if row["reload"] else []
        remarks.append(f"broker.conf: {row['rocketmq_name']}")
        out.line(f"    {'; '.join(remarks)}")


def describe(name: str) -> dict[str, Any]:
    """The description of an option."""
    option = FIELDS[name]
    metadata = option.metadata
    low, high = metadata["low"], metadata["high"]
    return {
        "name": name,
        "default": option.default,
        "unit": metadata["unit"],
        "bounds": _bounds(low, high, "{:,}".format),
        "low": low,
        "high": high,
        "reload": metadata["reload"],
        "rocketmq_name": rocketmq_name(name),
        "doc": metadata["doc"],
    }


def _bounds(low: Any, high: Any, shown: Callable[[Any], str]) -> str:
    texts = ["" if bound is None else shown(bound) for bound in (low, high)]
    return "…".join(texts) if any(texts) else ""


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name not in FIELDS:
            raise click.BadParameter(f"there is no option {name!r}; mqproc config doc lists all", param_hint="NAMES")
