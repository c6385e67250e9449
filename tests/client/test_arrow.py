"""Places of numbers in the head of an Arrow record batch."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from mqproc.arrow.batches import head_of
from mqproc.kernels.arrow import BODY_AT, BODY_LENGTH_AT, BUFFERS_AT, LENGTH_AT, NODES_AT

BUFFERS = {pa.int32(): 2, pa.int64(): 2, pa.string(): 3}


@pytest.mark.parametrize("before", [[], [("a", pa.int32())], [("a", pa.string()), ("b" * 300, pa.list_(pa.int64()))]])
def test_head_of_batch_takes_other_numbers(before: list[tuple[str, pa.DataType]]) -> None:
    """The last column is 5, null, 7; earlier ones have no buffers and are not read."""
    schema = pa.schema([*before, ("n", pa.int64())])
    head = head_of(schema)
    nodes = [node for _name, kind in before for node in [(3, 0)] + kind.num_fields * [(0, 0)]] + [(3, 1)]
    buffers = sum(BUFFERS.get(kind, 4) for _name, kind in before) * [(0, 0)] + [(0, 1), (8, 24)]
    values = np.array([0b101, 5, 0, 7], np.int64)
    words = np.concatenate([head.words, values])
    assert head.places[BODY_AT] == len(head.words)
    words[head.places[LENGTH_AT]] = 3
    words[head.places[BODY_LENGTH_AT]] = values.nbytes
    for place, pairs in ((NODES_AT, nodes), (BUFFERS_AT, buffers)):
        begin = head.places[place]
        words[begin : begin + 2 * len(pairs)] = np.array(pairs).reshape(-1)
    column = pa.ipc.read_record_batch(pa.py_buffer(words), schema).column(len(before))
    column.validate(full=True)
    assert column.to_pylist() == [5, None, 7]
