"""Holes in the contents of trees."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.diff.tree_diff import same_bytes
from protocol.tree import Chunk, Hole, filled, sparse

PAGE = 4096
PIECES = st.lists(st.sampled_from([b"x", b"x" * PAGE, bytes(PAGE), bytes(PAGE - 1), bytes(70_000)]), max_size=6)
CHUNKS: st.SearchStrategy[list[Chunk]] = st.lists(
    st.sampled_from([b"x", b"", bytes(5), bytes(PAGE), Hole(1), Hole(5), Hole(PAGE)]), max_size=6
)


@given(PIECES.map(b"".join))
def test_each_whole_page_of_zeros_becomes_a_hole_and_nothing_else(data: bytes) -> None:
    chunks = list(sparse(data))
    assert b"".join(filled(chunks)) == data
    at = 0
    for chunk in chunks:
        if not isinstance(chunk, Hole):
            assert bytes(PAGE) not in (chunk[start : start + PAGE] for start in range(0, len(chunk), PAGE))
            assert not at % PAGE
        at += len(chunk)


@given(CHUNKS, CHUNKS)
def test_holes_compare_as_the_zeros_that_they_are(left: list[Chunk], right: list[Chunk]) -> None:
    assert same_bytes(iter(left), iter(right)) == (b"".join(filled(left)) == b"".join(filled(right)))
