"""What `glob_paths` finds: patterns against a plain, slow matcher; what is looked at, skipped and cut off."""

from __future__ import annotations

import stat
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.search.patterns import MAX_ALTERNATIVES, expand
from protocol.search.walk import SKIP_NOTHING, USUAL_SKIPS, SkipRules, glob_paths
from protocol.tree import Tree, TreeEntry
from tests.support.trees import DictTree
from tests.unit.protocol.search.search_trees import DeepTree, FadingTree, WatchedTree


def tree_of(*paths: bytes) -> DictTree:
    return DictTree(dict.fromkeys(paths, b"x"))


def found(tree: Tree, pattern: str, path: bytes = b"") -> list[bytes]:
    return list(glob_paths(tree, pattern, path=path).paths)


# -- the oracle: one path and one pattern without braces at a time -----------------------------------
CLASSES = {"[ab]": "ab", "[!ab]": "ab", "[a-b]": "ab", "[]a]": "]a", "[!]]": "]", "[é]": "é", "[b-]": "b-"}


@cache
def name_matches(pattern: str, name: str) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "*":
        return name_matches(pattern[1:], name) or (bool(name) and name_matches(pattern, name[1:]))
    if not name:
        return False
    for text, members in CLASSES.items():
        if pattern.startswith(text):
            is_in = (name[0] in members) != text.startswith("[!")
            return is_in and name_matches(pattern[len(text) :], name[1:])
    return pattern[0] in {"?", name[0]} and name_matches(pattern[1:], name[1:])


def parts_match(pattern: list[str], parts: list[str]) -> bool:
    if not pattern:
        return not parts
    if pattern == ["**"]:
        return bool(parts)
    if pattern[0] == "**":
        return parts_match(pattern[1:], parts) or (bool(parts) and parts_match(pattern, parts[1:]))
    return bool(parts) and name_matches(pattern[0], parts[0]) and parts_match(pattern[1:], parts[1:])


def path_matches(pattern: str, path: bytes) -> bool:
    parts = path.decode("utf-8", "surrogateescape").split("/")
    if "/" not in pattern:
        return name_matches("*" if pattern == "**" else pattern, parts[-1])
    return parts_match(pattern.removeprefix("/").split("/"), parts)


NAMES = st.text("ab.é-]", min_size=1, max_size=4).filter(lambda name: name not in {".", ".."})
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(lambda parts: "/".join(parts).encode())
SEGMENTS = st.one_of(
    st.just("**"),
    st.lists(
        st.one_of(st.sampled_from(["a", "b", ".", "é", "*", "?"]), st.sampled_from(list(CLASSES))),
        min_size=1,
        max_size=4,
    )
    .map("".join)
    .filter(lambda text: text not in {".", ".."} and "**" not in text),
)
PATTERNS = st.tuples(st.sampled_from(["", "/"]), st.lists(SEGMENTS, min_size=1, max_size=4)).map(
    lambda parts: parts[0] + "/".join(parts[1])
)


def without_clashes(paths: set[bytes]) -> dict[bytes, bytes | str | tuple[TreeEntry, bytes] | None]:
    """As files; of a path and one below it, the latter."""
    return {path: b"" for path in paths if not any(other.startswith(path + b"/") for other in paths)}


@given(st.sets(PATHS, max_size=12), PATTERNS)
@example({b"a/b", b"b/b", b"a/a/b"}, "**/a/**/b")
@example({b"a-/b", b"a.b", b"a/b", b"a"}, "**")
@example({b"b", b"a/b"}, "a/**/**/b")
def test_a_path_is_found_where_the_pattern_matches_it_and_nowhere_else(paths: set[bytes], pattern: str) -> None:
    items = without_clashes(paths)
    wanted = sorted(path for path in items if path_matches(pattern, path))

    assert found(DictTree(items), pattern) == wanted


@given(st.sets(PATHS, max_size=12), PATTERNS, NAMES)
def test_below_a_directory_a_pattern_means_what_it_means_in_a_tree_of_that_directory(
    paths: set[bytes], pattern: str, name: str
) -> None:
    top = name.encode()
    inside = DictTree({top: None, **{top + b"/" + path: item for path, item in without_clashes(paths).items()}})
    wanted = [top + b"/" + path for path in found(DictTree(without_clashes(paths)), pattern.removeprefix("/"))]
    relative = pattern if "/" not in pattern.removeprefix("/") else pattern.removeprefix("/")

    if not relative.startswith("/"):
        assert found(inside, relative, top) == wanted


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.py", b"a.py d/b.py d/e/c.py"),
        ("/*.py", b"a.py"),
        ("d/*", b"d/b.py d/x"),
        ("d/**", b"d/b.py d/e/c.py d/x"),
        ("**/d/*.py", b"d/b.py"),
        ("./d//b.py", b"d/b.py"),
        ("d/", b""),
        ("d", b""),
        ("../a.py", b""),
        ("d/../a.py", b""),
        ("**/..", b""),
        ("a**y", b"a.py"),
        ("?.py", b"a.py d/b.py d/e/c.py"),
        ("{a,b}.py", b"a.py d/b.py"),
        ("{/*,d/*}.py", b"a.py d/b.py"),
        ("{/a,*}.py", b"a.py d/b.py d/e/c.py"),
        ("d/{x,e/{c,z}.py}", b"d/e/c.py d/x"),
        ("{/z,*.py}", b"a.py d/b.py d/e/c.py z"),  # an alternative for the root does not reach into directories
        ("{/x,*.py}", b"a.py d/b.py d/e/c.py"),
        ("\0", b""),
    ],
)
def test_patterns_and_what_they_are_for(pattern: str, names: bytes) -> None:
    tree = tree_of(b"a.py", b"d/b.py", b"d/e/c.py", b"d/x", b"z")

    assert found(tree, pattern) == names.split()


def test_a_pattern_from_the_root_finds_only_what_is_below_the_path() -> None:
    tree = tree_of(b"a.py", b"d/b.py", b"d/e/c.py", b"o/b.py")

    assert found(tree, "/d/*.py", b"d") == [b"d/b.py"]
    assert found(tree, "/*/e/*", b"d") == [b"d/e/c.py"]
    assert found(tree, "/*.py", b"d") == []
    assert found(tree, "/**/*.py", b"d") == [b"d/b.py", b"d/e/c.py"]
    assert found(tree, "/o/*.py", b"d") == []


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        (b"\xff\xfe.bin", "??.bin"),
        (b"\xff\xfe.bin", "\udcff*"),
        (b"\xff\xfe.bin", "[\udc80-\udcff]?.bin"),
        ("é".encode(), "?"),
        ("日本.txt".encode(), "[日月]?.txt"),
        (b"a\nb", "a?b"),
        (b"a\nb", "*b"),
        (b"with space'\"", "* space'\""),
        (b"[x]", "[[]x]"),
        (b"[x", "[x"),
        (b"a*b", r"a\*b"),
        (b"{a,b}", r"\{a,b}"),
        (b"{a}", "{a}"),
        (b"a,b", "a,b"),
        (b"{a", "{{a,b}"),
        (b"a\\", "a\\"),
        (b"-", "[a-]"),
        (b"x", "[!z-a]"),
        (b"^", r"[\^]"),
        (b"...", "..*"),
        (b".hidden", "*"),
        (b"a|b", "a|b"),
        (b"a$", "a$*"),
    ],
)
def test_odd_names_are_found_by_the_patterns_for_them(name: bytes, pattern: str) -> None:
    assert found(tree_of(name, b"other-name"), pattern)[0] == name


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("é".encode(), "??"),
        (b"axb", r"a\*b"),
        (b"a", "{a}"),
        (b"x", "[z-a]"),
        (b"ab", "a"),
        (b"A", "a"),
        (b"a", "[!a]"),
    ],
)
def test_names_that_only_look_alike_are_not_found(name: bytes, pattern: str) -> None:
    assert found(tree_of(name), pattern) == []


def test_a_pattern_of_many_stars_is_settled_for_a_name_that_almost_matches() -> None:
    tree = tree_of(b"a" * 255)

    assert found(tree, "*a" * 60 + "*b") == []
    assert found(tree, "*a" * 60) == [b"a" * 255]


@pytest.mark.parametrize(
    ("pattern", "expanded"),
    [
        ("a", ["a"]),
        ("{a,b}", ["a", "b"]),
        ("x{a,b{c,d}e,}y", ["xay", "xbcey", "xbdey", "xy"]),
        ("{a,b}{c,d}", ["ac", "ad", "bc", "bd"]),
        ("{a,b,{c,d}}", ["a", "b", "c", "d"]),
        ("{{a,b}}", ["{a}", "{b}"]),
        ("{a", ["{a"]),
        ("a}", ["a}"]),
        ("{}", ["{}"]),
        ("{{a,b}", ["{a", "{b"]),
        ("{a,b}}", ["a}", "b}"]),
        (r"{a\,b,c}", [r"a\,b", "c"]),
        (r"\{a,b}", [r"\{a,b}"]),
        ("{,}", ["", ""]),
    ],
)
def test_braces_are_written_out_as_a_shell_does(pattern: str, expanded: list[str]) -> None:
    assert expand(pattern) == expanded


@pytest.mark.parametrize("pattern", ["{a,b}" * 40, "{" + "a," * MAX_ALTERNATIVES + "b}"])
def test_braces_that_stand_for_too_much_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="more than 1000 patterns"):
        found(tree_of(b"a"), pattern)


@pytest.mark.parametrize("pattern", ["", "\ud800"])
def test_what_can_be_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        found(tree_of(b"a"), pattern)


def test_only_regular_files_are_found_and_symlinks_are_not_followed() -> None:
    fifo = TreeEntry(b"", stat.S_IFIFO | 0o644)
    tree = DictTree({b"d/f": b"", b"d/fifo": (fifo, b""), b"link": "d", b"d/link": "f", b"d/empty": None})

    assert found(tree, "**") == [b"d/f"]
    assert found(tree, "link/*") == []


def test_a_path_that_is_no_directory_is_refused() -> None:
    tree = tree_of(b"a/b")

    with pytest.raises(NotADirectoryError):
        found(tree, "*", b"a/b")
    with pytest.raises(FileNotFoundError):
        found(tree, "*", b"c")
    with pytest.raises(ValueError, match="limit"):
        glob_paths(tree, "*", limit=-1)


def test_at_the_limit_the_first_paths_are_given_and_that_there_are_more() -> None:
    tree = DictTree(dict.fromkeys([b"b", b"a/z", b"a.c", b"c/d"], b""))

    assert glob_paths(tree, "**", limit=2).paths == (b"a.c", b"a/z")
    assert glob_paths(tree, "**", limit=2).truncated
    assert glob_paths(tree, "**", limit=4).paths == (b"a.c", b"a/z", b"b", b"c/d")
    assert not glob_paths(tree, "**", limit=4).truncated
    assert glob_paths(tree, "nothing", limit=0).truncated is False


@pytest.mark.parametrize(
    ("pattern", "listed"),
    [
        ("*", [b"", b"a", b"a/b", b"c"]),
        ("/*", [b""]),
        ("a/*", [b"a"]),
        ("a/b/f", []),
        ("a/*/f", [b"a"]),
        ("{a,c}/*", [b"a", b"c"]),
        ("*/b/*", [b"", b"a/b"]),
        ("a/**", [b"a", b"a/b"]),
        ("../*", []),
    ],
)
def test_only_directories_that_can_hold_a_match_are_listed(pattern: str, listed: list[bytes]) -> None:
    tree = WatchedTree({b"a/b/f": b"", b"c/f": b"", b"g": b""})
    tree.listed.clear()
    glob_paths(tree, pattern)

    # The tree's own walk may look twice; a search may not.
    assert tree.listed == listed


SKIPPED = {
    b".git/config": b"",
    b".env": b"",
    b"node_modules/x/a.js": b"",
    b"src/__pycache__/a.pyc": b"",
    b"src/a.js": b"",
    b"src/vendor/b.js": b"",
    b"vendored/c.js": b"",
    b"logo.png": b"\x89PNG\0",
}


@pytest.mark.parametrize(
    ("skip", "skipped"),
    [
        (SKIP_NOTHING, set()),
        (USUAL_SKIPS, set(SKIPPED) - {b".env", b"src/a.js", b"vendored/c.js"}),
        (
            SkipRules(hidden_directories=False, directories=frozenset({b"vendored"}), binary_files=False),
            {b"vendored/c.js"},
        ),
    ],
)
def test_what_is_skipped_is_what_the_rules_say(skip: SkipRules, skipped: set[bytes]) -> None:
    assert glob_paths(DictTree({**SKIPPED}), "**", skip=skip).paths == tuple(sorted(set(SKIPPED) - skipped))


def test_a_directory_that_the_pattern_or_the_path_names_is_not_skipped() -> None:
    tree = DictTree({**SKIPPED})

    assert glob_paths(tree, ".git/*", skip=USUAL_SKIPS).paths == (b".git/config",)
    assert glob_paths(tree, "**/vendor/*.js", skip=USUAL_SKIPS).paths == (b"src/vendor/b.js",)
    assert glob_paths(tree, "*.js", path=b"node_modules", skip=USUAL_SKIPS).paths == (b"node_modules/x/a.js",)
    assert glob_paths(tree, ".g*/*", skip=USUAL_SKIPS).paths == ()


def test_a_skipped_directory_is_not_even_looked_at() -> None:
    tree = WatchedTree({**SKIPPED})
    tree.listed.clear()
    glob_paths(tree, "**", skip=USUAL_SKIPS)

    assert tree.listed == [b"", b"src", b"vendored"]


def test_content_is_read_only_to_tell_binary_files() -> None:
    tree = WatchedTree({b"a": b"", b"b": b"\0"})

    glob_paths(tree, "**")
    assert tree.was_read == []
    assert glob_paths(tree, "**", skip=USUAL_SKIPS).paths == (b"a",)


class Cancelled(Exception):
    pass


def test_keep_going_is_asked_for_every_directory_and_file_and_ends_the_search() -> None:
    tree = WatchedTree({f"d{i}/f{j}".encode(): b"" for i in range(5) for j in range(5)})
    tree.listed.clear()
    asked: list[int] = []

    def keep_going() -> None:
        asked.append(1)
        if len(asked) == 10:
            raise Cancelled

    with pytest.raises(Cancelled):
        glob_paths(tree, "**", keep_going=keep_going)
    assert tree.listed == [b"", b"d0", b"d1"]


def test_a_tree_that_is_deep_is_searched() -> None:
    path = b"/".join([b"d"] * 3_000 + [b"f"])

    assert found(DeepTree(path), "**/f") == [path]


def test_what_vanishes_during_a_search_is_not_found_and_ends_nothing() -> None:
    assert found(FadingTree(b"b", {b"a": b"", b"b/c": b"", b"d": b""}), "**") == [b"a", b"d"]
