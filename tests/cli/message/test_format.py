"""kcat's format strings, bodies in every shape."""

from __future__ import annotations

import dataclasses
import zlib

import pytest

from mqproc.cli.message.format import body_text, compile_format, shown_body, to_json, to_row
from mqproc.types import StoredMessage

MESSAGE = StoredMessage(
    "ID", 77, 99, "orders", 3, 12, "new", ("k1", "k2"), {"UNIQ_KEY": "U", "a": "b"}, 0, 0, 1000, "127.0.0.1:0", 2000,
    "127.0.0.1:1", 0, 0, 5, b'{"x": 1}',
)  # fmt: skip


def test_every_token() -> None:
    line = compile_format("%t[%p] %o %k %g %s %S %T %b %i %u %P %h %%\\n\\t\\x41")(MESSAGE)
    assert line == 'orders[3] 12 k1 k2 new {"x": 1} 8 2000 1000 ID U 77 UNIQ_KEY=U,a=b %\n\tA'


def test_an_unknown_token_is_told() -> None:
    with pytest.raises(ValueError, match="%q is not a field"):
        compile_format("%q")


def test_a_body_in_another_shape_stands_where_the_format_has_it() -> None:
    assert compile_format("%%s %s|%k", "hex")(MESSAGE) == "%s 7b2278223a20317d|k1 k2"
    assert compile_format("%s", "json")(MESSAGE) == '{"x":1}'
    assert compile_format("<%s>", "none")(MESSAGE) == "<>"


def test_fields_are_shown_as_asked_and_the_format_as_it_is() -> None:
    assert compile_format("\\x1b%t\\n", escape=str.upper)(MESSAGE) == "\x1bORDERS\n"


def test_bodies() -> None:
    assert shown_body(b"\xff", "hex") == "ff"
    assert shown_body(b'{"x": 1}', "json") == {"x": 1}
    assert shown_body(b"no json", "json") == "no json"
    assert shown_body(b'["\xff"]', "json") == '["\N{REPLACEMENT CHARACTER}"]'
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


def test_what_a_producer_compressed_is_shown_plain_in_every_shape() -> None:
    packed = dataclasses.replace(MESSAGE, sys_flag=0x301, body=zlib.compress(MESSAGE.body))
    for shape in ("text", "hex", "json"):
        assert to_json(packed, shape)["body"] == to_json(MESSAGE, shape)["body"]
        assert to_row(packed, shape, preview=False)["body"] == to_row(MESSAGE, shape, preview=False)["body"]
        assert compile_format("%s", shape)(packed) == compile_format("%s", shape)(MESSAGE)
    assert to_json(packed, "text")["body_base64"] == packed.to_json()["body_base64"]


def test_what_cannot_be_unpacked_is_shown_as_it_is_stored() -> None:
    for sys_flag in (0x1, 0x101, 0x201, 0x301, 0x701):
        broken = dataclasses.replace(MESSAGE, sys_flag=sys_flag)
        assert to_row(broken, "text", preview=False)["body"] == '{"x": 1}'
