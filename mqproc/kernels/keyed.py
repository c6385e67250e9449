"""Looking for records that the index must know: those with a unique id or keys, and not rolled back."""

from __future__ import annotations

from typing import Final

import numpy as np

from mqproc.kernels.ahead import prefetch_alike
from mqproc.kernels.fields import ABSENT, find_property, place_at, place_size, properties_at, properties_end
from mqproc.kernels.intrinsics import load_be32, load_be64, load_u8
from mqproc.kernels.jit import kernel
from mqproc.kernels.primitive import Bytes, Words
from mqproc.kernels.record_check import BLANK, record_size
from mqproc.kernels.views import as_kernel_array
from mqproc.layout import properties, record

# What a search says, int64[FOUND_SIZE]: where it stopped, and 1 when the record there has an entry in the index.
STOPPED_AT, IS_KEYED, AT_BLANK = range(3)
FOUND_SIZE = 3

UNIQ_KEY_NAME: Final = as_kernel_array(bytearray(properties.UNIQ_KEY.encode()))
KEYS_NAME: Final = as_kernel_array(bytearray(properties.KEYS.encode()))


_SPACE = ord(" ")


@kernel
def _has_word(view: Bytes, place: int) -> bool:
    """Whether a value that `find_property` found holds anything but spaces."""
    if place == ABSENT:
        return False
    at = place_at(place)
    end = at + place_size(place)
    while at < end and load_u8(view, at) == _SPACE:
        at += 1
    return at < end


@kernel
def find_keyed(view: Bytes, start: int, stop: int, base: int, uniq_key: Bytes, keys: Bytes, found: Words) -> None:
    """Walk records of view[start:stop] (a segment, its byte 0 at `base` in the log) to the first with a key.

    `uniq_key` and `keys` uint8[n] are the properties' names. Stops at a record with a key, at what is no record, at a
    BLANK, or at `stop`.
    """
    found[IS_KEYED] = 0
    found[AT_BLANK] = 0
    at = start
    last_total = 0
    while at < stop:
        total = record_size(view, at, view.size)
        if total < 0:
            found[AT_BLANK] = 1 if total == -BLANK else 0
            break
        if load_be64(view, at + record.PHYSICAL_OFFSET) != base + at:
            break
        prefetch_alike(view, at, total, last_total)
        last_total = total
        transaction = load_be32(view, at + record.SYS_FLAG) & record.SYS_FLAG_TRANSACTION_MASK
        if transaction != record.SYS_FLAG_ROLLBACK:
            first = properties_at(view, at)
            end = properties_end(view, at, total)
            has_id = find_property(view, first, end, uniq_key) != ABSENT
            if has_id or _has_word(view, find_property(view, first, end, keys)):
                found[IS_KEYED] = 1
                break
        at += total
    found[STOPPED_AT] = at


def warm() -> None:
    """Compile or load these kernels."""
    find_keyed(np.zeros(8, np.uint8), 0, 0, 0, UNIQ_KEY_NAME, KEYS_NAME, np.zeros(FOUND_SIZE, np.int64))
