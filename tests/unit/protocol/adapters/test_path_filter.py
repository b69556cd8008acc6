"""PathFilter: which paths its patterns hide."""

from __future__ import annotations

from protocol.adapters.git_patterns import PathFilter


def test_a_byte_that_is_not_utf8_matches_as_one_character() -> None:
    exclude = PathFilter(exclude=["*.log", "n?", "[!a-z].c"])
    assert exclude.hides(b"d\xff/\xff.log", is_directory=False)
    assert exclude.hides(b"n\xff", is_directory=False)
    assert exclude.hides(b"\xfe.c", is_directory=False)
    assert not exclude.hides(b"n\xff\xff", is_directory=False)
    include = PathFilter(include=["new/"])
    assert not include.lists(b"d\xff", is_directory=True)
    assert include.lists(b"\xff/new", is_directory=True)
    assert include.hides(b"\xff", is_directory=False)
