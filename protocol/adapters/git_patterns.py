"""GitPatterns: which paths a list of patterns in gitignore's syntax matches, as `git check-ignore` decides it.

`PathFilter` shows or hides the paths of a tree by such patterns.

A pattern that matches a directory matches everything below it, and no later `!` pattern takes that back.  Otherwise the
last pattern that matches a path decides.  Matching is on characters, where a byte that is not UTF-8 is one character.

Every pattern becomes one regular expression without nested repetitions: the part between two stars is matched as early
as possible and never again (an atomic group), so the time is linear in the path, whatever the pattern.

pathspec decides otherwise than git for `x/**`, for `!` after `*`, and for some brackets.

Source: gitignore(5); dir.c (parse_path_pattern, last_matching_pattern_from_list) and wildmatch.c of git.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from protocol.errors import check_type

_CACHED_BYTES: Final = 2 << 20
_ENTRY_BYTES: Final = 150  # of a cached answer, without its path
_CLASSES: Final = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": " \\t",
    "cntrl": "\\x00-\\x1f\\x7f",
    "digit": "0-9",
    "graph": "\\x21-\\x7e",
    "lower": "a-z",
    "print": "\\x20-\\x7e",
    "punct": "\\x21-\\x2f\\x3a-\\x40\\x5b-\\x60\\x7b-\\x7e",
    "space": "\\s",
    "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
}


class _Pattern(NamedTuple):
    """`literal` is the name that a pattern without wildcards and slashes matches; else `regex` decides."""

    is_negated: bool
    needs_directory: bool
    is_name: bool  # it has no slash, so it matches the last component
    literal: str | None
    regex: re.Pattern[str] | None
    directories: tuple[str, ...]  # the directories that a pattern with a slash names without wildcards


class GitPatterns:
    """The patterns of one list.  `bool()` tells whether there are any."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raise ValueError for a pattern that can match nothing, such as a comment."""
        for text in patterns:
            check_type(text, str, "a pattern must be a str")
        self._patterns = [_parse(text) for text in patterns]
        self._by_name: dict[str, list[int]] = {}
        self._others: list[int] = []  # the newest first
        for number, pattern in enumerate(self._patterns):
            if pattern.literal is not None:
                self._by_name.setdefault(pattern.literal, []).append(number)
            else:
                self._others.insert(0, number)
        self._answers: dict[bytes, bool] = {}  # by path; that of a directory ends with a slash
        self._cached_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._patterns)

    @property
    def has_directory_patterns(self) -> bool:
        """Whether some pattern matches directories only."""
        return any(pattern.needs_directory for pattern in self._patterns)

    @property
    def fixed_directories(self) -> Iterator[bytes]:
        """Paths that have to be directories for some pattern to match what it names, as `a` and `a/b` of `a/b/c*`."""
        for pattern in self._patterns:
            if not pattern.is_negated:
                for path in pattern.directories:
                    yield path.encode("utf-8", "surrogateescape")

    def matches(self, path: bytes, *, is_directory: bool) -> bool:
        """Whether the patterns match `path` or a directory above it.  The root, b"", is never matched."""
        answer = self._answers.get(path + b"/" if is_directory else path)
        return self._find(path, is_directory) if answer is None else answer

    def _find(self, path: bytes, is_directory: bool) -> bool:
        if not path:
            return False
        # From the nearest directory above whose answer is known.
        undecided = [(path, is_directory)]
        above, answer = path.rpartition(b"/")[0], False
        while above:
            known = self._answers.get(above + b"/")
            if known is not None:
                answer = known
                break
            undecided.append((above, True))
            above = above.rpartition(b"/")[0]
        for each, is_dir in reversed(undecided):
            answer = answer or bool(self.verdict(each, is_directory=is_dir))
            self._keep(each + b"/" if is_dir else each, answer)
        return answer

    def matches_here(self, path: bytes, *, is_directory: bool) -> bool:
        """Whether the patterns match `path`; the caller knows that they match no directory above it."""
        return bool(path) and bool(self.verdict(path, is_directory=is_directory))

    def verdict(self, path: bytes, *, is_directory: bool) -> bool | None:
        """Whether the last pattern that matches `path` itself is one without `!`; None if none matches it."""
        text = path.decode("utf-8", "surrogateescape")
        name = text.rpartition("/")[2]
        last = -1
        for number in reversed(self._by_name.get(name, ())):
            if is_directory or not self._patterns[number].needs_directory:
                last = number
                break
        for number in self._others:
            if number < last:
                break
            _, needs_directory, is_name, _, regex, _ = self._patterns[number]
            if needs_directory and not is_directory:
                continue
            if regex is not None and regex.fullmatch(name if is_name else text) is not None:
                last = number
                break
        return None if last < 0 else not self._patterns[last].is_negated

    def _keep(self, key: bytes, answer: bool) -> None:
        size = len(key) + _ENTRY_BYTES
        if self._cached_bytes + size > _CACHED_BYTES:
            self._answers.clear()
            self._cached_bytes = 0
        self._answers[key] = answer
        self._cached_bytes += size


def _parse(line: str) -> _Pattern:
    text = _without_trailing_spaces(line)
    if not text or text.startswith("#"):
        raise ValueError(
            f"{line!r} is not a pattern: it is empty or a comment; a name that begins with # is written \\#"
        )
    if "\0" in text or "\n" in text:
        raise ValueError(f"{line!r} is not a pattern: it has a NUL or a line break")
    is_negated = text.startswith("!")
    body = text[1:] if is_negated else text
    needs_directory = body.endswith("/")
    if needs_directory:
        body = body[:-1]
    is_name = "/" not in body
    body = body.removeprefix("/")
    if not body:
        raise ValueError(f"{line!r} is not a pattern: it names nothing")
    if is_name and not re.search(r"[*?[\\]", body):
        return _Pattern(is_negated, needs_directory, is_name, body, None, ())
    return _Pattern(is_negated, needs_directory, is_name, None, _compiled(body, line), _fixed(body))


def _without_trailing_spaces(line: str) -> str:
    text = line.rstrip(" ")
    if text == line:
        return line
    backslashes = len(text) - len(text.rstrip("\\"))
    return text + " " if backslashes % 2 else text


def _fixed(body: str) -> tuple[str, ...]:
    """Return the directories that the pattern names before its first wildcard."""
    found, at = [], ""
    for component in body.split("/")[:-1]:
        if not component or re.search(r"[*?[\\]", component):
            break
        at = f"{at}/{component}" if at else component
        found.append(at)
    return tuple(found)


def _compiled(body: str, line: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern.  ValueError if it is not complete."""
    # git compares what is before the first wildcard by itself, so in `ab**/c` the stars begin the rest, and match
    # slashes, although they are not a component of their own.
    begins = re.match(r"([^*?[\\]*[^*?[\\/])(\*\*+(?:/.*)?)$", body, re.DOTALL) if "/" in line else None
    prefix, rest = begins.groups() if begins else ("", body)
    segments = _segments(rest)
    if segments is None:
        raise ValueError(f"{line!r} is not a pattern: it ends within a bracket or with a backslash")
    return re.compile(re.escape(prefix) + _joined(segments, is_split=begins is not None), re.DOTALL)


def _joined(segments: Sequence[Sequence[str]], *, is_split: bool) -> str:
    """Join the sequences of components between `**`.  `is_split`: they may begin within a component.

    The earliest place at which a sequence matches is as good as any later one, so it is not tried again.
    """
    first, *rest = segments
    directory = "[^/]*/" if is_split else "[^/]+/"
    text = "/".join(first)
    for number, segment in enumerate(rest):
        is_last = number == len(rest) - 1
        text += "/" if first or number else ""
        if not segment:  # a pattern that ends with `**` matches everything below, but not the directory itself
            text += ".*" if is_split else ".+"
        elif is_last:
            text += rf"(?:{directory})*?{'/'.join(segment)}"
        else:
            text += rf"(?>(?:{directory})*?{'/'.join(segment)}(?=/))"
    return text


def _segments(body: str) -> list[list[str]] | None:
    """Split a pattern at slashes into regular expressions of components, and these at `**` into sequences."""
    segments: list[list[str]] = [[]]
    for component in _components(body):
        if component is None:
            return None
        if re.fullmatch(r"\*\*+", component):
            if len(segments) == 1 or segments[-1]:
                segments.append([])
            continue
        translated = _translated(component)
        if translated is None:
            return None
        segments[-1].append(translated)
    return segments


def _components(body: str) -> Iterator[str | None]:
    """Split at slashes outside of brackets.  A None says that a bracket is open at the end."""
    start = at = 0
    while at < len(body):
        if body.startswith("\\/", at):
            yield body[start:at]
            start = at = at + 2
        elif body[at] == "\\":
            at += 2
        elif body[at] == "[":
            end = _bracket_end(body, at)
            if end is None:
                yield None
                return
            at = end
        elif body[at] == "/":
            yield body[start:at]
            start = at = at + 1
        else:
            at += 1
    yield body[start:]


def _bracket_end(text: str, start: int) -> int | None:
    """Return the index after the bracket that begins at `start`."""
    at = start + 1
    if text[at : at + 1] in {"!", "^"}:
        at += 1
    is_first = True
    while at < len(text):
        if text[at] == "]" and not is_first:
            return at + 1
        is_first = False
        if text[at] == "\\":
            at += 2
        elif text.startswith("[:", at) and (end := text.find(":]", at + 2)) >= 0 and text[at + 2 : end].isalpha():
            at = end + 2
        else:
            at += 1
    return None


def _translated(component: str) -> str | None:
    """Translate the pattern of one component; None if it ends with a backslash."""
    parts = [""]  # between stars
    at = 0
    while at < len(component):
        character = component[at]
        if character == "*":
            parts.append("")
            at = len(component) - len(component[at:].lstrip("*"))
        elif character == "?":
            parts[-1] += "[^/]"
            at += 1
        elif character == "[":
            end = _bracket_end(component, at)
            assert end is not None, "checked before"
            parts[-1] += _bracket(component[at + 1 : end - 1])
            at = end
        elif character == "\\":
            if at + 1 == len(component):
                return None
            parts[-1] += re.escape(component[at + 1])
            at += 2
        else:
            parts[-1] += re.escape(character)
            at += 1
    first, *rest = parts
    if not rest:
        return first
    *middle, last = rest
    return first + "".join(rf"(?>[^/]*?{part})" for part in middle if part) + rf"[^/]*{last}"


def _bracket(inner: str) -> str:
    """Translate the inside of a bracket."""
    is_negated = inner[:1] in {"!", "^"}
    at = 1 if is_negated else 0
    items: list[str] = []
    previous: str | None = None  # a character that can begin a range
    while at < len(inner):
        if inner.startswith("[:", at) and (end := inner.find(":]", at + 2)) >= 0 and inner[at + 2 : end].isalpha():
            found = _CLASSES.get(inner[at + 2 : end])
            if found is None:
                return "(?!)"  # git: a malformed pattern matches nothing
            items.append(found)
            previous, at = None, end + 2
            continue
        if inner[at] == "-" and previous is not None and at + 1 < len(inner):
            at += 1
            if inner[at] == "\\":
                at += 1
            if previous <= inner[at]:
                items.append(f"{_in_set(previous)}-{_in_set(inner[at])}")
            previous, at = None, at + 1
            continue
        if inner[at] == "\\":
            at += 1
        previous = inner[at]
        items.append(_in_set(previous))
        at += 1
    if is_negated:
        return f"[^/{''.join(items)}]"
    return f"(?!/)[{''.join(items)}]" if items else "(?!)"


def _in_set(character: str) -> str:
    return re.escape(character) if ord(character) < 128 else character


class PathFilter:
    """Hides what a pattern of `exclude` matches, and everything below it.

    With `include`, a file is shown only if one of these patterns matches the file or a directory above it; directories
    are always shown.  A path that both match is hidden.
    """

    __slots__ = ("_exclude", "_include")

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        """Raise ValueError for an invalid pattern."""
        self._include = GitPatterns(include)
        self._exclude = GitPatterns(exclude)

    def __bool__(self) -> bool:
        return bool(self._include or self._exclude)

    def lists(self, path: bytes, *, is_directory: bool) -> bool:
        """Whether a change of the entry at `path`, which `hides` does not hide, is to be listed.

        A directory that no pattern of `include` matches is shown only for the files below it.
        """
        return not (self._include and is_directory) or self._include.matches(path, is_directory=True)

    def hides(self, path: bytes, *, is_directory: bool) -> bool:
        """Whether the entry at `path` is hidden; the caller has checked the directories above it."""
        if self._exclude and self._exclude.matches_here(path, is_directory=is_directory):
            return True
        return bool(self._include) and not is_directory and not self._include.matches(path, is_directory=False)
