r"""A tokenizer for RE2's syntax, as far as it is needed to find positions and literals.

RE2 itself reports that an expression is invalid but not where, and it looks for a required literal only at the start of
an expression.  Source: the page "Syntax" of RE2's wiki; re2/parse.cc.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["Token", "required_literal", "tokens_of"]

Kind = Literal["literal", "escape", "class", "open", "flags", "close", "or", "repeat", "other"]


@dataclass(frozen=True, slots=True)
class Token:
    """`text` at character `start` of the expression.  `value` is the text that a literal matches."""

    kind: Kind
    start: int
    text: str
    value: str = ""


# Tried in this order.  Each matches at least one character, and the last matches any.
_TOKEN: Final = re.compile(
    r"""
      (?P<quoted> \\Q .*? (?: \\E | \Z ) )
    | (?P<escaped> \\ [!-/:-@\[-`{-~] )                     # punctuation: itself
    | (?P<escape> \\ (?: [pP] (?: \{[^}]*\} | . ) | x (?: \{[^}]*\} | [0-9A-Fa-f]{2} ) | [0-7]{1,3} | . | \Z ) )
    | (?P<class> \[ \^? \]? (?: \[ : \^? \w* : \] | \\ . | [^\]\\] )* (?: \] | \Z ) )
    | (?P<flags> \( \? [a-zA-Z]* (?: - [a-zA-Z]* )? \) )
    | (?P<open> \( (?: \? (?: P? < [^>]* > | [a-zA-Z-]* : ) )? )
    | (?P<close> \) )
    | (?P<or> \| )
    | (?P<repeat> (?: [*+?] | \{ [0-9]+ (?: , [0-9]* )? \} ) \?? )
    | (?P<other> [.^$] )
    | (?P<literal> . )
    """,
    re.VERBOSE | re.DOTALL,
)


def tokens_of(pattern: str) -> Iterator[Token]:
    """The tokens of an expression, valid or not; together they cover all of it."""
    for found in _TOKEN.finditer(pattern):
        kind, text = found.lastgroup, found.group()
        match kind:
            case "quoted":
                yield Token("literal", found.start(), text, text[2:].removesuffix("\\E"))
            case "escaped":
                yield Token("literal", found.start(), text, text[1:])
            case "literal":
                yield Token("literal", found.start(), text, text)
            case "escape" | "class" | "open" | "flags" | "close" | "or" | "repeat" | "other":
                yield Token(kind, found.start(), text)


def required_literal(pattern: str) -> str:
    """Return a text that every match of a valid expression contains: the longest literal outside groups, or ""."""
    best = run = ""
    depth = 0
    for token in tokens_of(pattern):
        if _sets_flags(token) or (token.kind == "or" and depth == 0):
            return ""
        if token.kind in {"open", "close"}:
            depth += 1 if token.kind == "open" else -1
        if depth == 0 and token.kind == "literal":
            run += token.value
            continue
        if depth == 0 and token.kind == "repeat" and not token.text.startswith("+"):
            run = run[:-1]  # may be absent
        best = max(best, run, key=len)
        run = ""
    return max(best, run, key=len)


def _sets_flags(token: Token) -> bool:
    """Whether the tokens after this one may match in another mode, in particular without regard to case."""
    return token.kind == "flags" or (token.kind == "open" and token.text.startswith("(?") and _has_flags(token.text))


def _has_flags(opening: str) -> bool:
    return opening.endswith(":") and opening != "(?:"
