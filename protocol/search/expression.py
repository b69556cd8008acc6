r"""Expression: a regular expression that is searched for line by line, in linear time.

The engine is RE2.  Differences from Python's `re`:

- backreferences, look-around, atomic groups, possessive repeats, comments and (?x) raise ValueError, which names them;
- a repeat counts to 1,000 at most; `\Z` is written `\z`; `\C` (one byte) is refused, because it can split a character;
- `\w`, `\d`, `\s` and `\b` are ASCII only; `\pL`, `\p{Greek}`, `[[:alpha:]]` are supported;
- `(?i)` and `ignore_case` fold the case of any script.

Each line is searched separately: `^`, `\A`, `$` and `\z` match at its ends, nothing matches a "\n", and an expression
that requires one matches nothing.  A "\r" before the "\n" belongs to the line.

Where possible the whole text is searched at once, and only matching lines are examined.

RE2 reports that an expression is invalid but not where, and it looks for a required literal only at the start of an
expression.  So `tokens_of` splits the expression, as far as that is needed to find positions and literals.  Source: the
page "Syntax" of RE2's wiki; re2/parse.cc.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import re2  # type: ignore[import-untyped]

from protocol.errors import check_type

# The first match in a line: the number of newlines before the line, and byte offsets in the text: start and end of the
# line, start and end of the match.  A plain tuple: there may be one for each line of all files.
Hit: TypeAlias = tuple[int, int, int, int, int]
_Search: TypeAlias = Callable[[bytes, int, int], tuple[int, int] | None]


class Expression:
    """Compile an expression.  ValueError, with the position, for syntax that RE2 does not support."""

    def __init__(self, pattern: str, *, ignore_case: bool = False) -> None:
        check_type(pattern, str, "a pattern must be a str")
        try:
            pattern.encode()
        except UnicodeEncodeError as error:
            raise _invalid(error.start, "the pattern has a character that UTF-8 cannot encode", pattern) from None
        tokens = list(tokens_of(pattern))
        for token in tokens:
            if token.text == r"\C":
                raise _invalid(token.start, r"\C is not supported: it can match a part of a character", pattern)
        _compiled(pattern, tokens, ignore_case)
        # The first compilation is without the prefix, so that positions in errors refer to `pattern`.
        compiled = _compiled("(?m)" + pattern, tokens, ignore_case)
        self._is_of_one_line = any(_is_of_one_line(token) for token in tokens)
        self._required = b"" if ignore_case else required_literal(pattern).encode()
        is_literal = self._required and all(token.kind == "literal" for token in tokens)
        is_of_line = b"\n" not in self._required
        self._search = _finder(self._required) if is_literal and is_of_line else _searcher(compiled)

    def may_match(self, text: bytes) -> bool:
        """Return False only if no line of `text` can match.  Cheaper than `hits`; most files cannot match."""
        return self._required in text

    def hits(self, text: bytes, end: int | None = None) -> Iterator[Hit]:
        """Yield the matching lines of `text`, in order.

        A "\n" at the end of `text` starts no line.  Only the text before `end` is searched, but "$" matches there
        only if the line ends there.
        """
        if not text:
            return iter(())
        if end is None:
            end = len(text) - text.endswith(b"\n")
        return self._hits_by_line(text, end) if self._is_of_one_line else self._hits(text, end)

    def _hits(self, text: bytes, end: int) -> Iterator[Hit]:
        search = self._search
        at = newlines = 0  # of a line's start, always
        while at <= end:
            found = search(text, at, end)
            if found is None:
                return
            start, stop = found
            line_start = text.rfind(b"\n", at, start) + 1 or at
            line_end = text.find(b"\n", stop, end)
            if line_end < 0:
                line_end = end
            if line_start > at:
                newlines += text.count(b"\n", at, line_start)
            yield newlines, line_start, line_end, start, stop
            at = line_end + 1
            newlines += 1

    def _hits_by_line(self, text: bytes, end: int) -> Iterator[Hit]:
        at = newlines = 0
        while at <= end:
            line_end = text.find(b"\n", at, end)
            if line_end < 0:
                line_end = end
            # If `end` cuts the line, the rest of it is passed too, so that `\z` does not match there.
            rest = text.find(b"\n", line_end)
            line = text[at : rest if rest >= 0 else len(text)]
            found = self._search(line, 0, line_end - at)
            if found is not None:
                start, stop = found
                yield newlines, at, line_end, at + start, at + stop
            at = line_end + 1
            newlines += 1


def _is_of_one_line(token: Token) -> bool:
    r"""Whether the token means something else in a whole text than in a line: `\A`, `\z`, `(?-m)`."""
    return token.text in {r"\A", r"\z"} or (token.kind in {"flags", "open"} and "-" in token.text)


# -- compiling ---------------------------------------------------------------------------------------
def _compiled(pattern: str, tokens: list[Token], ignore_case: bool) -> Any:
    options = re2.Options()
    options.case_sensitive = not ignore_case
    options.never_nl = True
    options.never_capture = True  # groups are not used, and without them RE2 needs only its fastest engine
    options.log_errors = False
    try:
        return re2.compile(pattern.encode(), options)
    except re2.error as error:
        message = error.args[0]
        text = message.decode("utf-8", "replace") if isinstance(message, bytes) else str(message)
    finally:
        # RE2's cache holds 128 expressions of up to 8 MiB each: too much for a daemon.
        re2.purge()
    reason, _, fragment = text.partition(": ")
    position = _position(pattern, tokens, reason, fragment)
    raise _invalid(position, _reason(pattern, position, reason, fragment), pattern)


def _searcher(compiled: Any) -> _Search:
    """Return a function (text, start, end) -> span of the first match, or None.

    RE2's wrapper makes three objects for each match, which in a short line takes three times as long as the search;
    so the wrapped function is called directly.  It has no public name; without it the wrapper is used.
    """
    match = getattr(getattr(compiled, "_regexp", None), "Match", None)
    anchor = getattr(getattr(re2, "_Anchor", None), "UNANCHORED", None)
    if match is None or anchor is None:
        return _public_searcher(compiled)

    def search(text: bytes, start: int, end: int) -> tuple[int, int] | None:
        span: tuple[int, int] = match(anchor, text, start, end)[0]
        return span if span[0] >= 0 else None

    return search


def _finder(literal: bytes) -> _Search:
    size = len(literal)

    def search(text: bytes, start: int, end: int) -> tuple[int, int] | None:
        at = text.find(literal, start, end)
        return (at, at + size) if at >= 0 else None

    return search


def _public_searcher(compiled: Any) -> _Search:
    def search(text: bytes, start: int, end: int) -> tuple[int, int] | None:
        found = compiled.search(text, start, end)
        return None if found is None else found.span()

    return search


def _invalid(position: int, reason: str, pattern: str) -> ValueError:
    return ValueError(f"invalid regular expression at position {position}: {reason}: {pattern!r}")


def _position(pattern: str, tokens: list[Token], reason: str, fragment: str) -> int:
    """The position of `fragment`, which RE2's error names."""
    if reason in {"missing )", "unexpected )"}:
        return _unbalanced(tokens)
    if reason.startswith("trailing"):
        return len(pattern) - 1
    if reason == "invalid perl operator":  # RE2 cuts the fragment: "(?P" of "(?P=name)"
        for token in tokens:
            if token.text == "(" and pattern.startswith("(?", token.start):
                return token.start
    for token in tokens:
        if token.kind == "class" and fragment in token.text:
            return token.start + token.text.index(fragment)
        if fragment and token.kind != "literal" and pattern.startswith(fragment, token.start):
            return token.start
    return max(pattern.find(fragment), 0)


def _unbalanced(tokens: list[Token]) -> int:
    opened: list[int] = []
    for token in tokens:
        if token.kind == "open":
            opened.append(token.start)
        elif token.kind == "close":
            if not opened:
                return token.start
            opened.pop()
    return opened[-1] if opened else 0


_UNSUPPORTED: Final = (
    ("(?=", "look-around is not supported"),
    ("(?!", "look-around is not supported"),
    ("(?<=", "look-around is not supported"),
    ("(?<!", "look-around is not supported"),
    ("(?>", "atomic groups are not supported"),
    ("(?P=", "backreferences are not supported"),
    ("(?#", "comments are not supported"),
    (r"\Z", r"\Z is not supported, write \z"),
)


def _reason(pattern: str, position: int, reason: str, fragment: str) -> str:
    """RE2's reason, or a clearer one for syntax that works in Python's `re`."""
    for start, better in _UNSUPPORTED:
        if pattern.startswith(start, position):
            return better
    if reason == "invalid escape sequence" and fragment[1:2].isdigit():
        return "backreferences are not supported"
    if reason == "invalid repetition size":
        return f"{reason} {fragment} (the most is 1000)"
    # The message shows the whole pattern anyway.
    return f"{reason} {fragment}" if fragment and fragment != pattern else reason


Kind = Literal["literal", "escape", "class", "open", "flags", "close", "or", "repeat", "other"]


# -- tokens ----------------------------------------------------------------------------------------
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
