"""What `grep_tree` finds, against `re` on each line; which files it searches; what it refuses."""

from __future__ import annotations

import errno
import re
import stat
import tracemalloc

import pytest
import re2
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.backends.memory import MemoryVolume
from protocol.search.expression import Expression, required_literal, tokens_of
from protocol.search.grep import BLOCK_BYTES, GrepResult, grep_tree
from protocol.search.walk import USUAL_SKIPS, Unreadable, UnreadablePaths, glob_paths
from protocol.tree import TreeEntry
from protocol.types import GrepMatch
from tests.support.trees import DictTree
from tests.unit.protocol.search.search_trees import WatchedTree

Place = tuple[int, str, int, int]


def places(result: GrepResult) -> list[Place]:
    return [(m.line_number, m.line_content, m.match_start, m.match_end) for m in result.matches]


def found(text: str | bytes, pattern: str) -> list[Place]:
    content = text.encode() if isinstance(text, str) else text
    return places(grep_tree(DictTree({b"f": content}), pattern))


def expected(text: str, pattern: str) -> list[Place]:
    """Line by line, with `re`."""
    lines = text.split("\n")
    if not lines[-1]:
        del lines[-1]
    compiled = re.compile(pattern.replace(r"\z", r"\Z"), re.ASCII)
    return [(number, line, *match.span()) for number, line in enumerate(lines, 1) if (match := compiled.search(line))]


# Expressions that mean the same to both.  What is repeated is never empty: there the two count otherwise.
ATOMS = st.sampled_from(
    ["a", "b", "ab", "é", "😀", ".", r"\.", "[ab]", "[^a]", "[é-ü]", r"\w", r"\W", r"\s", r"\S", r"\d"]
)
EDGES = st.sampled_from(["", "^", "$", r"\b", r"\A", r"\z"])


def _pieces(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    item = st.one_of(ATOMS, inner.map(lambda text: f"(?:{text})"), inner.map(lambda text: f"({text})"))
    repeat = st.sampled_from(["", "+", "+?", "{1,2}", "{2}"])
    some = st.lists(st.tuples(item, repeat).map("".join), min_size=1, max_size=3).map("".join)
    return st.one_of(some, st.tuples(some, some).map("|".join))


SOLID = st.recursive(ATOMS, _pieces, max_leaves=4)
OPTIONAL = st.tuples(SOLID, st.sampled_from(["?", "*", "*?", "{0,2}", ""])).map(lambda pair: f"(?:{pair[0]}){pair[1]}")
PATTERNS = st.one_of(
    SOLID,
    st.tuples(EDGES, OPTIONAL, OPTIONAL, EDGES).map("".join),
    st.tuples(OPTIONAL, EDGES, OPTIONAL).map("".join),
)
TEXTS = st.text("aab \r\n\n.é😀", max_size=40)


@given(TEXTS, PATTERNS)
@example("", "")
@example("\n", "")
@example("\n", "^$")
@example("a\n", "$")
@example("a\n\n", "^$")
@example("\na\n\nb", "^")
@example("x\r\ny\r\n", "x$")
@example("x\r\ny\r\n", r"x\r$")
@example("a\nb", r"\Ab")
@example("a\nb", r"a\z")
@example("éa😀b", "[^é]b")
@example("ab\nab", "[^b]+")
@example("ab\nab", r"b\sa")
@example("ab\nab", r"b\Wa")
@example("ä\r\n😀é: needle ü\r\nneedle", "needle")  # offsets count characters
@example("a\x0bb\x0cc\x85d\u2028e\rf\ng", ".")  # only a newline ends a line
@example("aaaa\naa\n", "aa")
def test_the_first_match_of_each_line_is_what_re_finds_in_it(text: str, pattern: str) -> None:
    assert found(text, pattern) == expected(text, pattern)


@given(TEXTS, st.text("ab+*?.{}|()^$é,1", max_size=6))
def test_any_expression_that_both_take_finds_the_same_lines(text: str, pattern: str) -> None:
    try:
        wanted = expected(text, pattern)
        result = found(text, pattern)
    except (ValueError, re.error):
        return
    # Not the spans: (|a)* is matched in another way.
    if "{," not in pattern and "+}" not in pattern:
        assert [place[:2] for place in result] == [place[:2] for place in wanted]


@given(TEXTS, PATTERNS)
def test_a_required_literal_is_in_all_that_matches(text: str, pattern: str) -> None:
    for _, line, _, _ in expected(text, pattern):
        assert required_literal(pattern) in line


@pytest.mark.parametrize(
    ("pattern", "literal"),
    [
        ("needle", "needle"),
        (r"^def \w+\(self", "(self"),
        ("ab+c", "ab"),
        ("abc*d", "ab"),
        ("abc?", "ab"),
        ("abc{0,2}", "ab"),
        ("a{,2}b", "a{,2}b"),
        ("(abc)?de", "de"),
        ("abc|d", ""),
        ("(a|b)cd", "cd"),
        ("(?i)abc", ""),
        ("(?i:x)abc", ""),
        ("(?:x)abc", "abc"),
        ("(?P<n>x)abc", "abc"),
        (r"a\.b", "a.b"),
        (r"a\db", "a"),
        (r"\Qa.b*\Ec", "a.b*c"),
        (r"\Qab\E*", "a"),
        ("[abc]de", "de"),
        ("[]a]bc", "bc"),
        ("[[:alpha:]]bc", "bc"),
        (r"\p{Greek}bc", "bc"),
        (r"\x{41}bc", "bc"),
        (r"\101bc", "bc"),
    ],
)
def test_the_required_literal_of_an_expression(pattern: str, literal: str) -> None:
    assert required_literal(pattern) == literal


@given(st.text(r"ab\()[]{}?*+|:^$.QE<>P=i-0", max_size=20))
def test_tokens_are_the_whole_of_any_text(pattern: str) -> None:
    assert "".join(token.text for token in tokens_of(pattern)) == pattern


@pytest.mark.parametrize(
    "pattern", ["a\nb", r"a\nb", r"a\sb", r"a[^x]b", "(?s)a.b", r"a\x0ab", r"a[\n]b", r"a\Wb", r"(?s)\Aa.b"]
)
def test_no_match_goes_over_the_end_of_a_line(pattern: str) -> None:
    assert found("a\nb\n", pattern) == []


def test_flags_in_an_expression_are_those_of_a_line() -> None:
    assert found("b\nAB", "(?i)^a") == [(2, "AB", 0, 1)]
    assert found("b\nab", "(?-m)^a") == [(2, "ab", 0, 1)]
    assert found("b\nab", "(?-m:b$)") == [(1, "b", 0, 1), (2, "ab", 1, 2)]
    assert found("b\nab", "(?i-s:^A)") == [(2, "ab", 0, 1)]


def test_case_is_ignored_when_asked_in_any_script() -> None:
    tree = DictTree({b"f": "Needle\nNEEDLE\nÄRGER\n".encode()})

    assert len(grep_tree(tree, "needle", ignore_case=True).matches) == 2
    assert len(grep_tree(tree, "ärger", ignore_case=True).matches) == 1
    assert grep_tree(tree, "needle").matches == ()


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(a|a?)+b", "a*a*a*a*a*a*a*b", "(.*)*x"])
def test_an_expression_that_is_catastrophic_elsewhere_is_settled(pattern: str) -> None:
    assert found("a" * 100_000 + "!", pattern) == []


@pytest.mark.parametrize(
    ("pattern", "position", "reason"),
    [
        ("a(", 1, "missing )"),
        ("(a)(b", 3, "missing )"),
        ("ab)", 2, "unexpected )"),
        ("é[z-a]", 2, "invalid character class range z-a"),
        ("x[ab", 1, "missing ]"),
        (r"ab\h", 2, "invalid escape sequence"),
        ("ab\\", 2, "trailing"),
        ("a**", 1, "bad repetition"),
        ("b|*", 2, "no argument for repetition"),
        ("a{1001}", 1, "most is 1000"),
        (r"\\1(a)\1", 6, "backreferences are not supported"),
        ("(?P<n>a)(?P=n)", 8, "backreferences are not supported"),
        ("x(?=a)", 1, "look-around is not supported"),
        ("x(?!a)", 1, "look-around is not supported"),
        ("x(?<=a)", 1, "look-around is not supported"),
        ("x(?<!a)", 1, "look-around is not supported"),
        ("(?>a)", 0, "atomic groups are not supported"),
        (r"a\Z", 1, r"write \z"),
        (r"\\C\C", 3, r"\C is not supported"),
        ("ab\udc80", 2, "a character that UTF-8 cannot encode"),
    ],
)
def test_an_expression_that_cannot_be_taken_is_refused_with_its_position(
    pattern: str, position: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"at position {position}: .*{re.escape(reason)}"):
        found("a", pattern)


@given(st.text(r"ab\()[]{}?*+|:^$.QE<>P=i-0,1é", max_size=12))
def test_any_text_is_either_searched_for_or_refused_with_a_position_inside(pattern: str) -> None:
    try:
        found("ab\n", pattern)
    except ValueError as error:
        position = re.search(r"at position (\d+)", str(error))
        assert position is not None
        assert 0 <= int(position[1]) <= len(pattern)


def test_a_refused_expression_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="position"):
        found("a", "(")
    assert capfd.readouterr() == ("", "")


# -- which files ---------------------------------------------------------------------------------------
FILES: dict[bytes, bytes | str | tuple[TreeEntry, bytes] | None] = {
    b"a.py": b"needle",
    b"b.txt": b"hay\nneedle\n",
    b"d-x": b"needle",
    b"d/c.py": b"needle",
    b"node_modules/e.py": b"needle",
    b".hidden/f.py": b"needle",
    b"link": "a.py",
    b"fifo": (TreeEntry(b"", stat.S_IFIFO | 0o644), b""),
    b"empty": b"",
}


def files(result: GrepResult) -> list[str]:
    return [match.path for match in result.matches]


def test_all_files_are_searched_in_the_order_of_their_paths() -> None:
    result = grep_tree(DictTree(FILES), "needle")

    assert files(result) == [".hidden/f.py", "a.py", "b.txt", "d-x", "d/c.py", "node_modules/e.py"]
    assert not result.truncated
    assert result.matches[2] == GrepMatch("b.txt", 2, "needle", 0, 6)


def test_skips_path_and_glob_say_which_files() -> None:
    tree = DictTree(FILES)

    assert files(grep_tree(tree, "needle", skip=USUAL_SKIPS)) == ["a.py", "b.txt", "d-x", "d/c.py"]
    assert files(grep_tree(tree, "needle", glob="*.py", skip=USUAL_SKIPS)) == ["a.py", "d/c.py"]
    assert files(grep_tree(tree, "needle", glob="/*.{py,txt}")) == ["a.py", "b.txt"]
    assert files(grep_tree(tree, "needle", path=b"d")) == ["d/c.py"]
    assert files(grep_tree(tree, "needle", path=b"node_modules", skip=USUAL_SKIPS)) == ["node_modules/e.py"]


def test_a_file_can_be_searched_alone() -> None:
    tree = DictTree(FILES)

    assert files(grep_tree(tree, "needle", path=b"d/c.py")) == ["d/c.py"]
    assert files(grep_tree(tree, "needle", path=b"d/c.py", glob="*.py")) == ["d/c.py"]
    assert files(grep_tree(tree, "needle", path=b"d/c.py", glob="*.txt")) == []


def test_a_path_that_cannot_be_searched_is_refused() -> None:
    with pytest.raises(FileNotFoundError):
        grep_tree(DictTree(FILES), "x", path=b"nowhere")
    with pytest.raises(NotADirectoryError):
        grep_tree(DictTree(FILES), "x", path=b"link")
    with pytest.raises(ValueError, match="max_matches"):
        grep_tree(DictTree(FILES), "x", max_matches=-1)


def test_files_that_do_not_match_the_glob_are_not_read() -> None:
    tree = WatchedTree(dict(FILES))
    grep_tree(tree, "needle", glob="d/*.py")

    assert tree.was_read == [b"d/c.py"]


def test_a_name_that_is_not_utf_8_is_given_with_surrogate_escapes() -> None:
    assert files(grep_tree(DictTree({b"\xff\n": b"needle"}), "needle")) == ["\udcff\n"]


@pytest.mark.parametrize(
    "content",
    [
        b"needle\0",
        b"needle" + b" " * 8_000 + b"\0",
        b"needle\xff",
        b"needle" + b" " * 20_000 + "é".encode()[:1],
        b"needle\n" + b" " * BLOCK_BYTES + b"\xc3",
        b"needle\n\0" + b" " * BLOCK_BYTES,
        b"needle\n" + b"\xff" * BLOCK_BYTES,
        b"needle \xed\xa0\x80",
    ],
)
def test_a_file_that_is_binary_or_not_utf_8_is_skipped(content: bytes) -> None:
    result = grep_tree(DictTree({b"a": content, b"b": b"needle"}), "needle")

    assert files(result) == ["b"]


def test_a_nul_far_from_the_start_is_text() -> None:
    assert len(found(b"needle" + b" " * 8_192 + b"\0", "needle")) == 1


@pytest.mark.parametrize("error", [errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ENAMETOOLONG])
def test_files_and_directories_that_cannot_be_read_are_named(error: int) -> None:
    class Holed(DictTree):
        def read(self, path: bytes, offset: int, size: int) -> bytes:
            if path.endswith(b"bad"):
                raise OSError(error, "a hole", path)
            return super().read(path, offset, size)

        def children(self, path: bytes) -> list[bytes]:
            if path.endswith(b"closed"):
                raise OSError(error, "a hole", path)
            return super().children(path)

    tree = Holed(
        {b"a/bad": b"needle", b"a/good": b"needle", b"closed/x": b"needle", b"z": b"needle", b"bad": b"needle"}
    )
    result = grep_tree(tree, "needle")
    assert files(result) == ["a/good", "z"]
    assert [each.path for each in result.unreadable.named] == [b"a/bad", b"bad", b"closed"]
    assert {each.reason for each in result.unreadable.named} == {"a hole"}
    found = glob_paths(tree, "*")
    assert found.paths == (b"a/bad", b"a/good", b"bad", b"z")
    assert found.unreadable == UnreadablePaths([Unreadable(b"closed", "a hole")], 1)
    assert grep_tree(tree, "needle", path=b"closed").unreadable.named == [Unreadable(b"closed", "a hole")]
    assert grep_tree(tree, "needle", path=b"a/bad").unreadable.named == [Unreadable(b"a/bad", "a hole")]


def test_what_vanishes_meanwhile_is_not_named() -> None:
    class Vanishing(DictTree):
        def read(self, path: bytes, offset: int, size: int) -> bytes:
            raise FileNotFoundError(errno.ENOENT, "gone", path)

    result = grep_tree(Vanishing(FILES), "needle")
    assert result.unreadable == UnreadablePaths()


def test_a_thousand_unreadable_files_are_named_and_all_are_counted() -> None:
    class Locked(DictTree):
        def read(self, path: bytes, offset: int, size: int) -> bytes:
            raise PermissionError(errno.EACCES, "locked", path)

    result = grep_tree(Locked({b"f%d" % number: b"x" for number in range(1_200)}), "x")
    assert (len(result.unreadable.named), result.unreadable.count) == (1_000, 1_200)


def test_an_error_of_the_backend_ends_the_search() -> None:
    class Broken(DictTree):
        is_gone = False

        def entry(self, path: bytes) -> TreeEntry:
            if self.is_gone:
                raise OSError(5, "broken", path)
            return super().entry(path)

        def read(self, path: bytes, offset: int, size: int) -> bytes:
            self.is_gone = True
            raise OSError(5, "broken", path)

    with pytest.raises(OSError, match="broken"):
        grep_tree(Broken(FILES), "needle")


def test_a_memory_volume_is_searched_as_any_tree() -> None:
    volume = MemoryVolume()
    items = {**FILES, b"big": big_text().encode(), b"lat\xff": b"\xff"}
    volume.import_tree(DictTree(items), replace=True)

    with volume.tree() as tree:
        for pattern in ["needle", "^$", "line 1[0-9]*7 "]:
            assert grep_tree(tree, pattern) == grep_tree(DictTree(items), pattern)
        for pattern in ["**", "*.py", "d/*", "/*.txt", "d/c.py", "nowhere/x"]:
            assert glob_paths(tree, pattern) == glob_paths(DictTree(items), pattern)
        with pytest.raises(FileNotFoundError):
            glob_paths(tree, "*", path=b"nowhere")


# -- limits --------------------------------------------------------------------------------------------
def test_at_the_limit_the_first_matches_are_given_and_that_there_are_more() -> None:
    tree = DictTree({b"a": b"x\nx\nx\n", b"b": b"x\n", b"c": b"y\n"})

    assert [(m.path, m.line_number) for m in grep_tree(tree, "x", max_matches=2).matches] == [("a", 1), ("a", 2)]
    assert grep_tree(tree, "x", max_matches=2).truncated
    assert grep_tree(tree, "x", max_matches=3).truncated
    assert not grep_tree(tree, "x", max_matches=4).truncated
    assert len(grep_tree(tree, "x", max_matches=4).matches) == 4
    assert grep_tree(tree, "x", max_matches=0) == GrepResult((), True, UnreadablePaths())


def test_what_comes_after_the_last_wanted_match_is_not_read() -> None:
    tree = WatchedTree({b"a": b"x\nx\n", b"b": b"x", b"c": b"x"})
    grep_tree(tree, "x", max_matches=2)

    assert tree.was_read == [b"a", b"b"]


@pytest.mark.parametrize(
    ("before", "after", "width"), [(0, 100, 20), (100, 0, 20), (100, 100, 20), (10, 0, 20), (7, 9, 22), (500, 500, 6)]
)
def test_a_long_line_is_cut_to_a_part_that_holds_the_match(before: int, after: int, width: int) -> None:
    text = "é" * before + "needle" + "ü" * after
    (match,) = grep_tree(DictTree({b"f": text.encode()}), "needle", max_line_characters=width).matches

    assert len(match.line_content) == min(width, len(text))
    assert match.line_content in text
    assert match.line_content[match.match_start : match.match_end] == "needle"


def test_a_line_that_is_cut_after_the_match_keeps_the_offsets_of_the_whole() -> None:
    (match,) = grep_tree(DictTree({b"f": b"abneedle" + b"x" * 5_000}), "needle", max_line_characters=10).matches

    assert match == GrepMatch("f", 1, "abneedlexx", 2, 8)


def test_a_match_longer_than_what_is_shown_is_shown_from_its_start() -> None:
    text = "-" * 100 + "a" * 100
    (match,) = grep_tree(DictTree({b"f": text.encode()}), "a+", max_line_characters=20).matches

    assert match.line_content == "-" * 5 + "a" * 15
    assert (match.match_start, match.match_end) == (5, 20)


def big_text() -> str:
    """Over two blocks; characters and lines lie across their bounds."""
    lines = [f"line {number} é😀" + "ü" * (number % 97) for number in range(1, 25_000)]
    lines[100] = lines[20_000] = "the needle"
    return "\n".join(lines)


@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("pattern", ["needle", r"^line 1\d{4}7 é", "9 é.ü+$"])
def test_a_file_of_many_blocks_is_searched_as_one(pattern: str, shift: int) -> None:
    text = " " * shift + big_text()
    assert len(text.encode()) > 2 * BLOCK_BYTES

    result = grep_tree(DictTree({b"f": text.encode()}), pattern, max_matches=100_000)

    assert places(result) == expected(text, pattern)


@pytest.mark.parametrize("ending", ["", "\n", "\nneedle", "\n\nneedle\n"])
def test_lines_after_one_that_fills_blocks_have_their_numbers(ending: str) -> None:
    text = "first\n" + "é" * 2 * BLOCK_BYTES + "\nneedle\n" + "x" * 3 * BLOCK_BYTES + ending

    assert found(text, "needle") == expected(text, "needle")
    assert [place[0] for place in found(text, "^")] == list(range(1, len(expected(text, "^")) + 1))


@pytest.mark.parametrize("pattern", ["é$", r"é\z", r"é\b$", r"(?-m)é$"])
def test_where_a_line_is_cut_it_does_not_end(pattern: str) -> None:
    text = "é" * 3 * BLOCK_BYTES + "x\n"

    assert found(text, pattern) == []
    assert [place[0] for place in found(text, "^é+")] == [1]


def test_a_match_in_the_first_block_of_a_long_line_is_found() -> None:
    text = "x" * (BLOCK_BYTES - 100) + "needle" + "x" * 2 * BLOCK_BYTES
    ((number, line, start, end),) = found(text, "needle")

    assert (number, line[start:end]) == (1, "needle")


class EndlessTree(DictTree):
    """One file that is made as it is read."""

    def __init__(self, size: int, line: bytes) -> None:
        super().__init__({b"big": b""})
        self.by_path[b"big"] = TreeEntry(b"big", stat.S_IFREG | 0o644, size=size)
        self.lines = line * (2 * BLOCK_BYTES // len(line))
        self.read_to = 0

    def read(self, path: bytes, offset: int, size: int) -> bytes:
        self.read_to = offset + size
        return self.lines[: min(size, self.by_path[path].size - offset)]


@pytest.mark.parametrize("line", [b"0123456\n", b"01234567"])
def test_a_big_file_is_searched_in_little_memory(line: bytes) -> None:
    tree = EndlessTree(256 << 20, line)
    tracemalloc.start()
    try:
        result = grep_tree(tree, "needle|[x-z]+$")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert (result.matches, tree.read_to) == ((), 256 << 20)
    assert peak < 12 << 20


class Cancelled(Exception):
    pass


def test_keep_going_ends_a_search_between_files_and_inside_a_big_one() -> None:
    asked: list[int] = []

    def keep_going() -> None:
        asked.append(1)
        if len(asked) == 7:
            raise Cancelled

    with pytest.raises(Cancelled):
        grep_tree(EndlessTree(1 << 40, b"0123456\n"), "needle", keep_going=keep_going)
    asked.clear()
    tree = WatchedTree({f"f{i}".encode(): b"" for i in range(20)})
    with pytest.raises(Cancelled):
        grep_tree(tree, "needle", keep_going=keep_going)
    assert tree.was_read == [f.encode() for f in sorted(f"f{i}" for i in range(20))][:5]


def test_a_wrapper_of_re2_without_its_inner_names_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x1 x22\n\nno\ny é1\n".encode()
    expected = list(Expression(r"\w?\d+").hits(text))
    compiled = re2.compile

    class OnlySearch:
        def __init__(self, *args: object) -> None:
            self.search = compiled(*args).search

    monkeypatch.setattr(re2, "compile", OnlySearch)
    assert list(Expression(r"\w?\d+").hits(text)) == expected
    assert [hit[0] for hit in expected] == [0, 3]


@pytest.mark.parametrize("word", ["a.b", "\\Qa.b\\E", "é", "a\nb", "\\Qa\nb\\E"])
def test_a_plain_word_is_found_as_an_expression_would_find_it(word: str) -> None:
    text = "a.b a.b\nxé\né\na\nb\naXb\n".encode()
    assert list(Expression(word).hits(text)) == list(Expression(f"(?:{word})").hits(text))
