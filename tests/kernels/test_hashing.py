"""Java's String.hashCode, compiled over bytes and plain over strings, against a reference."""

from __future__ import annotations

import codecs
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mqproc.kernels import hashing
from mqproc.kernels.jit.compile import plain
from mqproc.kernels.jit.lowering import Bytes
from mqproc.layout import index_file
from mqproc.layout.index_file import index_key_hash_of
from mqproc.layout.properties import java_hash

ROOT = Path(__file__).resolve().parents[2]
SLOTS = 5_000_000
ENCODABLE = st.characters(exclude_categories=["Cs"])


def reference(text: str) -> int:
    """`h = 31 * h + charAt(i)` with Java's int arithmetic."""
    units: list[int] = []
    for character in text:
        code = ord(character)
        if code > 0xFFFF:
            units += [0xD800 + (code - 0x10000 >> 10), 0xDC00 + (code - 0x10000 & 0x3FF)]
        else:
            units.append(code)
    value = 0
    for unit in units:
        value = 31 * value + unit
    return (value + 2**31) % 2**32 - 2**31


def _replace_as_java(error: UnicodeError) -> tuple[str, int]:
    """One U+FFFD per malformed sequence; an encoded surrogate counts once."""
    assert isinstance(error, UnicodeDecodeError)
    rest = error.object[error.start : error.start + 3]
    if rest[0] == 0xED and len(rest) > 1 and 0xA0 <= rest[1] <= 0xBF:
        return "\ufffd", error.start + (3 if len(rest) > 2 and 0x80 <= rest[2] <= 0xBF else 2)
    return "\ufffd", error.end


codecs.register_error("replace_as_java", _replace_as_java)


def as_array(content: bytes) -> Bytes:
    return np.frombuffer(bytearray(content), np.uint8)


def hash_utf8(content: bytes, seed: int = 0) -> int:
    """Compiled hash at an odd address between other bytes; must equal the plain twin."""
    buf = as_array(b"\xff" + content + b"\xc3\xa9 31")
    compiled = hashing.java_hash_utf8(buf, 1, 1 + len(content), seed)
    assert plain(hashing.java_hash_utf8)(buf, 1, 1 + len(content), seed) == compiled
    return compiled


@settings(deadline=None)
@given(st.text(ENCODABLE, max_size=60))
@example("")
@example("a\U0001f600b")
@example("seven77中")
@example("abcdefgh" * 3 + "é")
@example("\U0010ffff\ud7ff\ue000\uffff\x00\x7f\x80\u07ff\u0800\U00010000")
def test_any_text_matches_reference(text: str) -> None:
    expected = reference(text)
    assert java_hash(text) == expected
    assert hash_utf8(text.encode()) == expected


@settings(deadline=None)
@given(st.text(st.characters(max_codepoint=127), max_size=100))
def test_ascii_of_any_length_matches_reference(text: str) -> None:
    assert hash_utf8(text.encode()) == reference(text) == java_hash(text)


@pytest.mark.parametrize("length", range(34))
@pytest.mark.parametrize("fill", ["\x7f", "\x00", "z"], ids=repr)
def test_lengths_around_multiples_of_eight(length: int, fill: str) -> None:
    text = "T#" + fill * length
    assert hash_utf8(text.encode()) == reference(text)


@settings(deadline=None)
@given(st.text(ENCODABLE, max_size=30), st.text(ENCODABLE, max_size=30))
def test_a_seed_continues_a_hash(first: str, second: str) -> None:
    assert hash_utf8(second.encode(), seed=java_hash(first)) == reference(first + second)


@settings(deadline=None)
@given(st.binary(max_size=24))
@example(b"\xed\xa0\x80")
@example(b"\xed\xa0")
@example(b"\xed\xb0x")
@example(b"\xed\xa0\x80\xed\xb0\x80")
@example(b"\xc3")
@example(b"\xe4\xb8")
@example(b"\xf0\x9f\x98")
@example(b"\xf0\x9f\x98a\xf0\x9fa\xf0a")
@example(b"\xf4\x90\x80\x80\xf5\x80\x80\x80\xf8")
@example(b"\xc0\x80\xc1\xbf\xe0\x9f\xbf\xf0\x8f\xbf\xbf")
@example(b"\x80\xbf\xfe\xff")
def test_malformed_bytes_hash_as_java_decodes_them(content: bytes) -> None:
    assert hash_utf8(content) == reference(content.decode("utf-8", "replace_as_java"))


@settings(deadline=None)
@given(st.integers(0, 2), st.sampled_from(["中", "é", "\U0001f600", "z"]), st.binary(max_size=4))
def test_malformed_bytes_after_text(before: int, character: str, content: bytes) -> None:
    whole = (character * before).encode() + content
    assert hash_utf8(whole) == reference(whole.decode("utf-8", "replace_as_java"))


def test_a_lone_surrogate_in_a_string_counts_as_its_unit() -> None:
    for units in ([0xD83D], [0xDE00], [0xDFFF, 0xD800]):
        text = "a" + "".join(map(chr, units))
        assert java_hash(text) == reference(text)


def test_a_surrogate_pair_is_two_units() -> None:
    assert hash_utf8("😀".encode()) == 31 * 0xD83D + 0xDE00 == java_hash("😀")


def test_the_smallest_hash_has_no_absolute_value() -> None:
    text = "polygenelubricants"
    assert java_hash(text) == hash_utf8(text.encode()) == -(2**31)
    for index_key_hash in (hashing.index_key_hash, index_file.index_key_hash):
        assert index_key_hash(-(2**31)) == 0
        assert index_key_hash(-(2**31) + 1) == 2**31 - 1 == index_key_hash(2**31 - 1)
        assert index_key_hash(0) == 0


def test_rocketmq_vectors() -> None:
    assert hash_utf8(b"TagA") == java_hash("TagA") == 2598919 == 0x27A807
    assert hash_utf8(b"T#k1") == java_hash("T#k1") == 2539445
    assert [index_key_hash_of("T", key) for key in ("k1", "k2", "k4")] == [0x0026BFB5, 0x0026BFB6, 0x0026BFB8]
    assert [index_key_hash_of("T", key) % 10 for key in ("k1", "k2", "k4")] == [5, 6, 8]


def test_colliding_keys_share_a_slot() -> None:
    """`Ea` and `FB` have the same hash: as topics they put all keys into one slot or hash."""
    assert java_hash("Ea") == java_hash("FB") == 2236
    key = "20231001123456"
    for topic in ("Ea", "FB"):
        prefix = hash_utf8(f"{topic}#".encode())
        hashed = hashing.index_key_hash(hash_utf8(key.encode(), seed=prefix))
        assert hashed == index_key_hash_of(topic, key) == 19_583_063
        assert hashed == hashing.index_key_hash(hash_utf8(f"{topic}#{key}".encode()))
        assert hashed % SLOTS == 4_583_063


def test_layout_does_not_load_the_compiler() -> None:
    code = (
        "import sys, mqproc.layout.properties as h; assert h.java_hash('TagA') == 2598919;"
        "import mqproc, mqproc.layout; print(sorted({'numba', 'llvmlite', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
