"""RocketMQ's config JSON: standard JSON, but maps with integer keys are written with the keys unquoted.

RocketMQ also reads what editors and people leave: a byte order mark, and a comma behind the last element.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.store.final_syncs import Syncing

# A string, an unquoted integer key, or a last comma; strings are matched first so that nothing inside one is touched.
_STRING_OR_ODD = re.compile(r'("(?:[^"\\]|\\.)*")|([{,]\s*)(-?\d+)(\s*:)|,(?=\s*[}\]])')
_BYTE_ORDER_MARK = "\ufeff"
# A string, and the colon behind it when it is a key.
_STRING = re.compile(rb'("(?:[^"\\]|\\.)*")(\s*:)?')
_INTEGER = re.compile(rb"-?\d+")


def parse(text: str) -> Any:
    """The value of a RocketMQ config file. Raises msgspec.DecodeError when it is none."""
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        # Most are standard JSON.
        return msgspec.json.decode(text)
    try:
        return msgspec.json.decode(_STRING_OR_ODD.sub(_as_standard, text.removeprefix(_BYTE_ORDER_MARK)))
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None


def _as_standard(match: re.Match[str]) -> str:
    string, before, key, after = match.groups()
    if string is not None:
        return string
    return f'{before}"{key}"{after}' if key is not None else ""


def table_in(value: Any, name: str) -> dict[str, Any]:
    """The table of a config file. Raises ValueError where there is none: what has something else is another file."""
    table = value.get(name, None if value else {}) if isinstance(value, dict) else None
    if not isinstance(table, dict):
        raise ValueError(f"no {name} in it")
    return table


def load(io: StoreIO, path: Path, take: Callable[[Any], object] = lambda value: None) -> tuple[Any, str]:
    """The value of `path`, or of its `.bak` as RocketMQ does, and a remark ("" when all was well).

    `take` gets the value, and raises AttributeError, TypeError or ValueError for one that it cannot use: the `.bak`
    counts then too. Returns (None, "") when neither file is there. Raises CorruptStoreError when no copy can be read.
    """
    remarks: list[str] = []
    for candidate in (path, path.with_name(path.name + ".bak")):
        if not io.exists(candidate):
            continue
        try:
            text = io.read_file(candidate).decode()
            if text.strip():
                value = parse(text)
                take(value)
                return value, "; ".join(remarks)
            remarks.append(f"{candidate.name} is empty")
        except IsADirectoryError:
            remarks.append(f"{candidate.name} is a folder")
        except (msgspec.DecodeError, AttributeError, TypeError, ValueError) as error:
            remarks.append(f"{candidate.name}: {error}")
    if any("is empty" not in remark for remark in remarks):
        raise CorruptStoreError(f"{path}: {'; '.join(remarks)}")
    return None, "; ".join(remarks)


def save(
    io: StoreIO, syncs: Syncing, path: Path, value: Any, *, integer_keys: bool = False, keeps_old: bool = True
) -> None:
    """Replace a config file atomically, keeping the one before it as `.bak`. Raises OSError, FailedSyncError.

    One that cannot be read replaces no `.bak`: until the new one is there that may be the only one that can. Nor does
    one that the caller could not use, which says so by `keeps_old`.

    `syncs` makes it durable; a role gives its FinalSyncs.
    `integer_keys`: keys that are integers are written unquoted, as RocketMQ does in maps by queue id.
    """
    for _ in save_steps(io, syncs, path, value, integer_keys=integer_keys, keeps_old=keeps_old):
        pass


def save_steps(
    io: StoreIO, syncs: Syncing, path: Path, value: Any, *, integer_keys: bool = False, keeps_old: bool = True
) -> Iterator[None]:
    """The same in two steps, so that others have a turn in between; `value` is of the first one."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=1)
    if integer_keys:
        text = _STRING.sub(_unquoted, text)
    io.make_folder(path.parent)
    if keeps_old and io.exists(path) and _is_whole(before := io.read_file(path)):
        syncs.write_file_atomically(path.with_name(path.name + ".bak"), before)
        yield
    syncs.write_file_atomically(path, text)


def _is_whole(data: bytes) -> bool:
    try:
        text = data.decode()
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            # What it says is passed over: it may be of thousands of topics.
            msgspec.json.decode(text, type=msgspec.Raw)
            return True
        parse(text)
    except (UnicodeDecodeError, msgspec.DecodeError):
        return False
    return True


def _unquoted(match: re.Match[bytes]) -> bytes:
    string, colon = match.groups()
    return string[1:-1] + colon if colon and _INTEGER.fullmatch(string[1:-1]) else match[0]
