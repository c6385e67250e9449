"""Parse RocketMQ's SQL92 with lark; errors name the position of the character.

Keywords are case-insensitive, names of properties are case-sensitive. Prefix operators bind tightest, so `NOT a = 1` is
`(NOT a) = 1`. RocketMQ stops at the first word that it cannot parse and ignores the rest; here this is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import cast

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedEOF, UnexpectedToken, VisitError

from mqproc.errors import FilterSyntaxError
from mqproc.filters import expressions
from mqproc.filters.expressions import (
    DOUBLE_MAX,
    DOUBLE_MIN,
    INT_MAX,
    LONG_MAX,
    And,
    Comparison,
    Double,
    Equal,
    In,
    Int,
    IsNull,
    Literal,
    Long,
    Negate,
    Node,
    Not,
    Or,
    OrderedComparison,
    TextMatch,
    TextMatchKind,
)

_GRAMMAR = r"""
    start: _or
    _or: any_of | _and
    any_of: _and (_OR _and)+
    _and: all_of | _equality
    all_of: _equality (_AND _equality)+

    _equality: equal | not_equal | is_null | is_not_null | _comparison
    equal: _equality "=" _comparison
    not_equal: _equality _UNEQUAL _comparison
    is_null: _equality _IS NULL
    is_not_null: _equality _IS _NOT NULL

    _comparison: ordered | between | not_between | one_of | none_of | holds | not_holds | _unary
    ordered: _comparison ORDER _unary
    between: _comparison _BETWEEN _unary _AND _unary
    not_between: _comparison _NOT _BETWEEN _unary _AND _unary
    one_of: _comparison _IN "(" STRING ("," STRING)* ")"
    none_of: _comparison _NOT _IN "(" STRING ("," STRING)* ")"
    holds: _comparison PART STRING
    not_holds: _comparison _NOT PART STRING

    _unary: "+" _unary | negate | negation | _primary
    negate: "-" _unary
    negation: _NOT _unary
    _primary: text | integer | real | true | false | null | property | "(" _or ")"
    text: STRING
    integer: INTEGER
    real: REAL
    true: TRUE
    false: FALSE
    null: NULL
    property: NAME

    _AND.2: /(?ai:and)(?![A-Za-z0-9_$])/
    _OR.2: /(?ai:or)(?![A-Za-z0-9_$])/
    _NOT.2: /(?ai:not)(?![A-Za-z0-9_$])/
    _IS.2: /(?ai:is)(?![A-Za-z0-9_$])/
    _IN.2: /(?ai:in)(?![A-Za-z0-9_$])/
    _BETWEEN.2: /(?ai:between)(?![A-Za-z0-9_$])/
    PART.2: /(?ai:contains|startswith|endswith)(?![A-Za-z0-9_$])/
    TRUE.2: /(?ai:true)(?![A-Za-z0-9_$])/
    FALSE.2: /(?ai:false)(?![A-Za-z0-9_$])/
    NULL.2: /(?ai:null)(?![A-Za-z0-9_$])/
    NAME.1: /[A-Za-z_$][A-Za-z0-9_$]*/

    _UNEQUAL.2: "<>"
    ORDER: ">=" | "<=" | ">" | "<"
    STRING: /'(''|[^'])*'/
    REAL.2: /([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+/
    INTEGER.1: /(0|[1-9][0-9]*)[lL]?/

    %ignore /[ \t\n\r\f]+/
    %ignore /--[^\n\r]*/
    %ignore /\/\*[^*]*\*+([^\/*][^*]*\*+)*\//
"""

# Names of expected terminals in errors; a name replaces a set of terminals if all of them are expected.
_VALUE = frozenset({"NAME", "STRING", "INTEGER", "REAL", "TRUE", "FALSE", "NULL", "LPAR", "PLUS", "MINUS", "_NOT"})
_COMPARISON = frozenset({"EQUAL", "_UNEQUAL", "_IS", "ORDER", "_BETWEEN", "_IN", "PART", "_NOT"})
_NAMES = {
    "a property or a value": _VALUE,
    "a comparison": _COMPARISON,
    "a comparison by order": frozenset({"ORDER", "_BETWEEN", "_IN", "PART"}),
    "'='": frozenset({"EQUAL", "_UNEQUAL", "_IS"}),
    "a text in '…'": frozenset({"STRING"}),
    "AND": frozenset({"_AND"}),
    "OR": frozenset({"_OR"}),
    "NOT": frozenset({"_NOT"}),
    "NULL": frozenset({"NULL"}),
    "IN, BETWEEN or CONTAINS": frozenset({"_IN", "_BETWEEN", "PART"}),
    "'('": frozenset({"LPAR"}),
    "')'": frozenset({"RPAR"}),
    "','": frozenset({"COMMA"}),
    "the end": frozenset({"$END"}),
}
_PARTS = {part.value: part for part in TextMatchKind}


def _text(token: Token) -> str:
    return str(token)[1:-1].replace("''", "'")


@v_args(inline=True)
class _TreeBuilder(Transformer[Token, Node]):
    """Builds the expression tree, one method for each rule of the grammar."""

    def start(self, node: Node) -> Node:
        return expressions.condition(node)

    def any_of(self, *parts: Node) -> Node:
        return Or(tuple(map(expressions.condition, parts)))

    def all_of(self, *parts: Node) -> Node:
        return And(tuple(map(expressions.condition, parts)))

    def negation(self, inner: Node) -> Node:
        return Not(expressions.condition(inner))

    def equal(self, left: Node, right: Node) -> Node:
        return Equal(left, right)

    def not_equal(self, left: Node, right: Node) -> Node:
        return Not(Equal(left, right))

    def is_null(self, inner: Node, _null: Token) -> Node:
        return IsNull(inner)

    def is_not_null(self, inner: Node, _null: Token) -> Node:
        return Not(IsNull(inner))

    def ordered(self, left: Node, order: Token, right: Node) -> Node:
        return OrderedComparison(left, right, Comparison(str(order)))

    def between(self, value: Node, low: Node, high: Node) -> Node:
        return expressions.between(value, low, high)

    def not_between(self, value: Node, low: Node, high: Node) -> Node:
        return expressions.not_between(value, low, high)

    def one_of(self, inner: Node, *texts: Token) -> Node:
        return In(inner, tuple(map(_text, texts)))

    def none_of(self, inner: Node, *texts: Token) -> Node:
        return Not(In(inner, tuple(map(_text, texts))))

    def holds(self, inner: Node, part: Token, text: Token) -> Node:
        return TextMatch(inner, _PARTS[part.upper()], _text(text), False)

    def not_holds(self, inner: Node, part: Token, text: Token) -> Node:
        return TextMatch(inner, _PARTS[part.upper()], _text(text), True)

    def negate(self, inner: Node) -> Node:
        return Negate(inner)

    def text(self, token: Token) -> Node:
        return Literal(_text(token), _at(token))

    def integer(self, token: Token) -> Node:
        value = int(str(token).rstrip("lL")[:24])
        if value > LONG_MAX:
            raise expressions.error_at(f"{str(token)[:24]} does not fit 64 bits", _at(token))
        return Literal(Int(value) if value <= INT_MAX else Long(value), _at(token))

    def real(self, token: Token) -> Node:
        value = float(token)
        if not DOUBLE_MIN <= value <= DOUBLE_MAX:
            raise expressions.error_at(f"{str(token)[:24]} is not between {DOUBLE_MIN} and {DOUBLE_MAX}", _at(token))
        return Literal(Double(value), _at(token))

    def true(self, token: Token) -> Node:
        return Literal(True, _at(token))

    def false(self, token: Token) -> Node:
        return Literal(False, _at(token))

    def null(self, token: Token) -> Node:
        return Literal(None, _at(token))

    def property(self, token: Token) -> Node:
        return expressions.PropertyRef(str(token), _at(token))


def _at(token: Token) -> int:
    return token.start_pos or 0


@functools.cache
def _parser() -> Lark:
    """Create the parser when the first filter is used; most stores never use one."""
    return Lark(_GRAMMAR, parser="lalr", lexer="basic", transformer=_TreeBuilder(), maybe_placeholders=False)


def parse(text: str) -> Node:
    """Parse a filter to its expression tree. Raises FilterSyntaxError."""
    try:
        return cast(Node, _parser().parse(text))
    except VisitError as failure:
        if isinstance(failure.orig_exc, FilterSyntaxError):
            raise failure.orig_exc from None
        raise
    except UnexpectedCharacters as failure:
        place = failure.pos_in_stream or 0
        found = text[place]
        problem = "unterminated text" if found == "'" else f"unexpected character {found!r}"
        raise expressions.error_at(problem, place) from None
    except UnexpectedEOF as failure:
        raise expressions.error_at(
            f"the filter ends where {_expected(failure.expected)} is expected", len(text)
        ) from None
    except UnexpectedToken as failure:
        if failure.token.type == "$END":
            problem, place = "the filter ends", len(text)
        else:
            problem, place = f"{str(failure.token)[:32]!r} found", _at(failure.token)
        raise expressions.error_at(f"{problem} where {_expected(failure.expected)} is expected", place) from None


def _expected(terminals: Iterable[str]) -> str:
    left, names = set(terminals), []
    for name, stands_for in _NAMES.items():
        if stands_for <= left:
            names.append(name)
            left -= stands_for
    return " or ".join(names + sorted(left))
