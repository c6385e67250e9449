"""kcat's format strings, bodies in every shape."""

from __future__ import annotations

import pytest

from mqproc.cli.message_format import body_text, compile_format, shown_body, to_json, to_row
from mqproc.message import StoredMessage

MESSAGE = StoredMessage(
    "ID", 77, 99, "orders", 3, 12, "new", ("k1", "k2"), {"UNIQ_KEY": "U", "a": "b"}, 0, 0, 1000, "127.0.0.1:0", 2000,
    "127.0.0.1:1", 0, 0, 5, b'{"x": 1}',
)  # fmt: skip


def test_every_token() -> None:
    line = compile_format("%t[%p] %o %k %g %s %S %T %b %i %u %P %h %%\\n\\t\\x41")(MESSAGE)
    assert line == 'orders[3] 12 k1 k2 new {"x": 1} 8 2000 1000 ID U 77 UNIQ_KEY=U,a=b %\n\tA'


def test_an_unknown_token_is_told() -> None:
    with pytest.raises(ValueError, match="%q is no field"):
        compile_format("%q")


def test_a_body_in_another_shape_stands_where_the_format_has_it() -> None:
    assert compile_format("%%s %s|%k", "hex")(MESSAGE) == "%s 7b2278223a20317d|k1 k2"
    assert compile_format("%s", "json")(MESSAGE) == '{"x":1}'
    assert compile_format("<%s>", "none")(MESSAGE) == "<>"


def test_fields_are_shown_as_asked_and_the_format_as_it_is() -> None:
    assert compile_format("\\x1b%t\\n", shown=str.upper)(MESSAGE) == "\x1bORDERS\n"


def test_bodies() -> None:
    assert shown_body(b"\xff", "hex") == "ff"
    assert shown_body(b'{"x": 1}', "json") == {"x": 1}
    assert shown_body(b"no json", "json") == "no json"
    assert shown_body(b"x", "none") is None
    assert body_text(b"a\xff") == "a\ufffd"


def test_json_has_the_bodys_shape_only_when_asked_for() -> None:
    assert "body" not in to_json(MESSAGE, None)
    assert to_json(MESSAGE, "json")["body"] == {"x": 1}
    assert "body_base64" not in to_json(MESSAGE, "none")


def test_a_preview_is_short() -> None:
    row = to_row(MESSAGE, "text", preview=True)
    assert row["body"] == '{"x": 1}'
    assert row["unique_id"] == "U"
