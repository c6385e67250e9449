"""What names and headers of index files say (layout/index_file.py)."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.io import Kind, StoreIO
from mqproc.kernels import index as kernels
from mqproc.kernels.intrinsics import load_be64
from mqproc.kernels.views import as_kernel_array
from mqproc.layout import index_file as layout
from mqproc.paths import index_name, index_name_time_ms

# The year 9999, whatever the time zone.
_NAMED_UNTIL_MS: Final = 253_402_000_000_000


class IndexHeader(msgspec.Struct, frozen=True):
    """The header's fields. `count` is the number of the next item; a file without entries has 1."""

    begin_timestamp_ms: int
    end_timestamp_ms: int
    begin_physical_offset: int
    end_physical_offset: int
    slots_used: int
    count: int


def read_header(view: NDArray[np.uint8]) -> IndexHeader:
    """The header of a mapped file; the count first, so that what it covers is not newer than the rest."""
    fields = np.empty(kernels.HEADER_FIELDS, np.int64)
    kernels.load_header(view, fields)
    return IndexHeader(*fields.tolist())


def index_file_names(io: StoreIO, folder: Path) -> list[str]:
    """Names of the index files, oldest first; whatever else lies in the folder is passed over."""
    entries = io.entries(folder)
    return [entry.name for entry in entries if entry.kind is Kind.FILE and index_name_time_ms(entry.name) is not None]


def file_ms(name: str) -> int:
    """The time that an index file's name tells."""
    time_ms = index_name_time_ms(name)
    assert time_ms is not None, name
    return time_ms


def last_offset(io: StoreIO, path: Path) -> int:
    """CommitLog offset of the last record that a file's header tells of; −1 when it tells nothing."""
    fd = io.open(path)
    try:
        header = io.pread(fd, layout.HEADER_SIZE, 0)
    finally:
        io.close(fd)
    if len(header) < layout.HEADER_SIZE:
        return -1
    view = as_kernel_array(header)
    return load_be64(view, layout.END_PHYSICAL_OFFSET) if kernels.published_count(view) > layout.FIRST_ITEM else -1


def next_name(store_timestamp_ms: int, previous: str) -> str:
    """Name for a file whose first entry has this store time; it sorts behind `previous` ('' = none).

    That is the later of the store time and one millisecond after the previous name. Local time may be set back an
    hour; then the previous name counts on as it reads. A store time that no calendar has, as a damaged record without a
    CRC of its own may tell, counts as the earliest.
    """
    name = index_name(store_timestamp_ms if 0 <= store_timestamp_ms < _NAMED_UNTIL_MS else 1)
    if name > previous:
        return name
    moment = datetime.strptime(previous[:14], "%Y%m%d%H%M%S") + timedelta(milliseconds=int(previous[14:]) + 1)
    return f"{moment:%Y%m%d%H%M%S}{moment.microsecond // 1000:03d}"
