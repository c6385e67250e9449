"""kcat format strings, and bodies in every shape."""

from __future__ import annotations

import zlib

import msgspec
import pytest

from mqproc.cli.message.format import body_text, compile_format, shown_body, to_json, to_row
from mqproc.layout.record_codec import stored_message

ID = "7F00000100000001000000000000004D"
MESSAGE = stored_message(
    ID, {"UNIQ_KEY": "U", "a": "b"}, sys_flag=0, size=99, topic="orders", queue_id=3, queue_offset=12, tag="new",
    keys=("k1", "k2"), born_timestamp_ms=1000, store_timestamp_ms=2000, body_crc=5, body=b'{"x": 1}',
)  # fmt: skip


def test_format_tokens() -> None:
    line = compile_format("%t[%p] %o %k %g %s %S %T %b %i %u %P %h %%\\n\\t\\x41")(MESSAGE)
    assert line == f'orders[3] 12 k1 k2 new {{"x": 1}} 8 2000 1000 {ID} U 77 UNIQ_KEY=U,a=b %\n\tA'


def test_format_unknown_token_is_refused() -> None:
    with pytest.raises(ValueError, match="%q is not a field"):
        compile_format("%q")


def test_format_prints_body_in_its_shape() -> None:
    assert compile_format("%%s %s|%k", "hex")(MESSAGE) == "%s 7b2278223a20317d|k1 k2"
    assert compile_format("%s", "json")(MESSAGE) == '{"x":1}'
    assert compile_format("<%s>", "none")(MESSAGE) == "<>"


def test_format_escapes_fields_only() -> None:
    assert compile_format("\\x1b%t\\n", escape=str.upper)(MESSAGE) == "\x1bORDERS\n"


def test_body_shapes() -> None:
    assert shown_body(b"\xff", "hex") == "ff"
    assert shown_body(b'{"x": 1}', "json") == {"x": 1}
    assert shown_body(b"no json", "json") == "no json"
    assert shown_body(b'["\xff"]', "json") == '["\N{REPLACEMENT CHARACTER}"]'
    assert shown_body(b"x", "none") is None
    assert body_text(b"a\xff") == "a\ufffd"


def test_json_body_shape_is_optional() -> None:
    assert "body" not in to_json(MESSAGE, None)
    assert to_json(MESSAGE, "json")["body"] == {"x": 1}
    assert "body_base64" not in to_json(MESSAGE, "none")


def test_preview_is_short() -> None:
    row = to_row(MESSAGE, "text", preview=True)
    assert row["body"] == '{"x": 1}'
    assert row["unique_id"] == "U"


def test_compressed_body_is_shown_uncompressed() -> None:
    packed = msgspec.structs.replace(MESSAGE, sys_flag=0x301, body=zlib.compress(MESSAGE.body))
    for shape in ("text", "hex", "json"):
        assert to_json(packed, shape)["body"] == to_json(MESSAGE, shape)["body"]
        assert to_row(packed, shape, preview=False)["body"] == to_row(MESSAGE, shape, preview=False)["body"]
        assert compile_format("%s", shape)(packed) == compile_format("%s", shape)(MESSAGE)
    assert to_json(packed, "text")["body_base64"] == packed.to_json()["body_base64"]


def test_compressed_body_corrupt_is_shown_as_stored() -> None:
    for sys_flag in (0x1, 0x101, 0x201, 0x301, 0x701):
        broken = msgspec.structs.replace(MESSAGE, sys_flag=sys_flag)
        assert to_row(broken, "text", preview=False)["body"] == '{"x": 1}'
