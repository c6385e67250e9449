"""Numbers with what they count, and sizes in words."""

from __future__ import annotations

import pytest

from mqproc.util.units import counted, parse_size


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "record", "0 records"),
        (1, "record", "1 record"),
        (1200, "record", "1,200 records"),
        (1, "index entry", "1 index entry"),
        (2, "index entry", "2 index entries"),
        (3, "key", "3 keys"),
    ],
)
def test_a_noun_has_the_form_that_its_number_wants(count: int, noun: str, text: str) -> None:
    assert counted(count, noun) == text


def test_a_size_may_have_a_unit() -> None:
    assert [parse_size(text) for text in ("17", "64KiB", "10MB", "1g")] == [17, 65_536, 10_000_000, 1 << 30]
    with pytest.raises(ValueError, match="'64 elephants' is not a size"):
        parse_size("64 elephants")
