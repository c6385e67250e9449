"""Parsing of stored property strings: valid pairs, also in the record codec."""

from __future__ import annotations

import pytest

from mqproc.layout import properties
from tests.support.records import decode_record, encode_record

PAIR_END = "\x02"


@pytest.mark.parametrize("end", ["", PAIR_END], ids=["open", "ended"])
@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("k1\x01v1", {"k1": "v1"}),
        ("", {}),
        (" ", {}),
        ("aaa", {}),
        ("k1\x01", {}),
        ("\x01v1", {}),
        ("\x01", {}),
        ("k1\x01v1\x02k2\x01v2", {"k1": "v1", "k2": "v2"}),
        # An invalid pair first, last, in the middle, or alone among empty ones.
        ("\x01v1\x02k2\x01v2", {"k2": "v2"}),
        ("k1\x02k2\x01v2", {"k2": "v2"}),
        ("k1\x01v1\x02\x01v2", {"k1": "v1"}),
        ("k1\x01v1\x02k2\x01", {"k1": "v1"}),
        ("k1\x01v1\x02k2\x01\x02k3\x01v3", {"k1": "v1", "k3": "v3"}),
        ("k1\x01v1\x02\x01v2\x02k3\x01v3", {"k1": "v1", "k3": "v3"}),
        ("\x02\x02k1\x01v1\x02\x02", {"k1": "v1"}),
        # One character each; only the first name's end counts; a later value of a name wins.
        ("k\x01v", {"k": "v"}),
        ("k\x01v\x02q\x01w", {"k": "v", "q": "w"}),
        ("k\x01v\x01w", {"k": "v\x01w"}),
        ("k\x01v\x02k\x01w", {"k": "w"}),
    ],
)
def test_whole_pairs_count_and_broken_ones_are_skipped(text: str, pairs: dict[str, str], end: str) -> None:
    assert properties.decode(text + end) == pairs
    assert decode_record(encode_record(topic="T", body=b"", properties=text + end)).properties == pairs
