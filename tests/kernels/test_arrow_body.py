"""Message bodies: the computed size is always sufficient; compiled and plain agree."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from mqproc.kernels import arrow, record_decode
from mqproc.kernels.jit.compile import plain
from mqproc.spark.batches import BatchMaker
from mqproc.spark.options import column_types
from mqproc.spark.record_reader import FoundRecords
from tests.support.records import kernel_bytes, outcomes_uncompiled, small_log


def outcomes() -> list[str]:
    """All rows of all records, with either naming of columns."""
    log = small_log(seed=3)
    found = FoundRecords(kernel_bytes(log.records), np.array([place for place, _size in log.places], np.int64))
    makers = (BatchMaker(naming, list(column_types(naming)), "/stores/one") for naming in COLUMN_NAMINGS)
    return [repr(row) for maker in makers for batch in maker.batches(found) for row in batch.to_pylist()]


COLUMN_NAMINGS = ("mqproc", "rocketmq")


def test_uncompiled_gives_the_same() -> None:
    assert outcomes_uncompiled(__file__) == outcomes()


@pytest.mark.parametrize("kernel", [arrow.body_size_max, plain(arrow.body_size_max)])
def test_column_beyond_offset_range_is_reported(kernel: Any) -> None:
    count = 3
    places = np.zeros((record_decode.PLACE_ROWS, count), np.int64)
    steps = np.array([[arrow.INT64, 0, 0, 0], [arrow.BYTES, record_decode.BODY, 0, 0]], np.int64)
    places[record_decode.BODY_SIZE] = [arrow.DATA_MAX - 2, 1, 1]
    assert kernel(places.reshape(-1), count, steps.reshape(-1), 2) > arrow.DATA_MAX
    places[record_decode.BODY_SIZE, 2] = 2
    assert kernel(places.reshape(-1), count, steps.reshape(-1), 2) == -2


if __name__ == "__main__":
    print(json.dumps(outcomes()))
