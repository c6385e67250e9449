"""How far long work is, line by line where there is no terminal."""

from __future__ import annotations

import io
import re

import pytest

from mqproc.cli import output as progress
from mqproc.cli.output import Output


@pytest.mark.parametrize(
    ("things", "rate_unit", "expected"),
    [("MiB", "MiB", r"job: 35 MiB, 50%, [\d,]+ MiB/s\n"), ("records", "", r"job: 35 records, 50%, [\d,]+/s\n")],
)
def test_a_rate_has_the_unit_of_what_is_counted(
    monkeypatch: pytest.MonkeyPatch, things: str, rate_unit: str, expected: str
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    errors = io.StringIO()
    with progress.Progress(Output(errors=errors), "job", things, rate_unit=rate_unit) as work:
        work.update(5, 10, 35)
    assert re.fullmatch(expected, errors.getvalue()), errors.getvalue()
