"""Run `mqproc …` inside the test's process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from mqproc.cli.main import main


@dataclass(frozen=True, slots=True)
class Outcome:
    """Exit code and output."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


@contextlib.contextmanager
def _stdin(data: bytes) -> Iterator[None]:
    with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(data))):
        yield


def call(*arguments: str | Path | int, stdin: bytes = b"", **environment: str) -> Outcome:
    """Run `mqproc` with these arguments and environment variables."""
    out, err = io.StringIO(), io.StringIO()
    others = {name: value for name, value in os.environ.items() if not name.startswith("MQPROC_")}
    variables = others | {"NO_COLOR": "1"} | environment
    with (
        mock.patch.dict("os.environ", variables, clear=True),
        _stdin(stdin),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main([str(argument) for argument in arguments])
    return Outcome(code, out.getvalue(), err.getvalue())
