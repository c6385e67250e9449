"""Formats that `mqproc import` reads, and what names of files tell of them."""

from __future__ import annotations

from pathlib import Path

import click

FORMATS = ("csv", "jsonl", "parquet", "lines")
_SUFFIXES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_PACKED = (".gz", ".bz2", ".xz", ".zip")
# Read as lines they would be garbage.
_NOT_READ = frozenset(
    ".tar .tgz .tbz2 .txz .zst .lz4 .lzma .z .7z .rar .br .xls .xlsx .orc .avro .feather .arrow".split()
)


def is_packed(name: str) -> bool:
    """Whether a file is unpacked while it is read."""
    return Path(name).suffix.lower() in _PACKED


def guess_kind(name: str) -> str:
    """The format that a name tells; plain lines when it tells none. Raises a usage error for one that is not read."""
    path = Path(name)
    if is_packed(name):
        path = path.with_suffix("")
    if path.suffix.lower() in _NOT_READ:
        raise click.UsageError(
            f"{name}: {path.suffix} is not read; unpack or convert it, or say with --format what the file has"
        )
    return _SUFFIXES.get(path.suffix.lower(), "lines")


def kind_of_member(name: str, member: str) -> str:
    """The format of a file inside a .zip: what the archive's name tells, else the member's own; plain lines else.

    Raises a usage error for one that is not read.
    """
    if Path(Path(name).stem).suffix.lower() in _SUFFIXES:
        return guess_kind(name)
    if is_packed(member):
        raise click.UsageError(f"{name}: {member} is packed once more, which is not read; unpack it")
    return guess_kind(member)
