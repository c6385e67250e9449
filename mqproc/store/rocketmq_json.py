"""RocketMQ's config JSON: standard JSON, but maps with integer keys have unquoted keys.

As in RocketMQ, a byte order mark and a trailing comma are accepted.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import OversizedFileError, StoreIO
from mqproc.store.sync_guard import Syncing

# A string, an unquoted integer key, or a trailing comma. Strings match first, so that nothing inside one is changed.
_STRING_OR_ODD = re.compile(r'("(?:[^"\\]|\\.)*")|([{,]\s*)(-?\d+)(\s*:)|,(?=\s*[}\]])')
_BYTE_ORDER_MARK = "\ufeff"
# A string, with the colon that follows it if it is a key.
_STRING = re.compile(rb'("(?:[^"\\]|\\.)*")(\s*:)?')
_INTEGER = re.compile(rb"-?\d+")


def parse(text: str) -> Any:
    """Parse a RocketMQ config file. Raises msgspec.DecodeError."""
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        # Most files are standard JSON.
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
    """A named table of a config file. Raises ValueError if it is another kind of file."""
    table = value.get(name, None if value else {}) if isinstance(value, dict) else None
    if not isinstance(table, dict):
        raise ValueError(f"no {name} in it")
    return table


def load(io: StoreIO, path: Path, accept: Callable[[Any], object] = lambda value: None) -> tuple[Any, str]:
    """Load `path`, or its `.bak` as RocketMQ does; returns value and remark ("" if all is well).

    `accept` gets the value and raises AttributeError, TypeError or ValueError to reject it; then the `.bak` is tried.
    Returns (None, "") if neither file exists. Raises CorruptStoreError if no copy can be read.
    """
    remarks: list[str] = []
    for candidate in (path, path.with_name(path.name + ".bak")):
        if not io.exists(candidate):
            continue
        try:
            text = io.read_file(candidate).decode()
            if text.strip():
                value = parse(text)
                accept(value)
                return value, "; ".join(remarks)
            remarks.append(f"{candidate.name} is empty")
        except OversizedFileError as error:
            remarks.append(f"{candidate.name}: {error.strerror}")
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
    """Replace a config file atomically, keeping a `.bak`. Raises OSError, FailedSyncError.

    The `.bak` stays if the old file is unreadable, or unusable according to `keeps_old`: it may be the only good copy.
    Roles pass their SyncGuard as `syncs`. `integer_keys`: write integer keys unquoted, as RocketMQ does in maps by
    queue id.
    """
    for _ in save_steps(io, syncs, path, value, integer_keys=integer_keys, keeps_old=keeps_old):
        pass


def save_steps(
    io: StoreIO, syncs: Syncing, path: Path, value: Any, *, integer_keys: bool = False, keeps_old: bool = True
) -> Iterator[None]:
    """`save` in two steps, for cooperative callers; `value` is encoded in the first one."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=1)
    if integer_keys:
        text = _STRING.sub(_unquoted, text)
    io.make_folder(path.parent)
    before = _read_old(io, path) if keeps_old else b""
    if before and _is_whole(before):
        syncs.write_file_atomically(path.with_name(path.name + ".bak"), before)
        yield
    syncs.write_file_atomically(path, text)


def _read_old(io: StoreIO, path: Path) -> bytes:
    try:
        return io.read_file(path)
    except (FileNotFoundError, OversizedFileError):
        return b""


def _is_whole(data: bytes) -> bool:
    try:
        text = data.decode()
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            # The content is skipped, not decoded: it may have thousands of topics.
            msgspec.json.decode(text, type=msgspec.Raw)
            return True
        parse(text)
    except (UnicodeDecodeError, msgspec.DecodeError):
        return False
    return True


def _unquoted(match: re.Match[bytes]) -> bytes:
    string, colon = match.groups()
    return string[1:-1] + colon if colon and _INTEGER.fullmatch(string[1:-1]) else match[0]
