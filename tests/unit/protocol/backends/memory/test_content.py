"""Content against the plainest model there is: a bytearray, and sets of the pages written and reserved."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocol.backends.memory.blocks import PAGE_BYTES
from protocol.backends.memory.content import BLOCK_BYTES, Content
from protocol.backends.memory.ledger import Ledger

LEDGER = Ledger()  # whose figures are checked elsewhere
EDGES = (0, 1, PAGE_BYTES, BLOCK_BYTES - PAGE_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES)
offsets = st.builds(lambda edge, by: max(0, edge + by), st.sampled_from(EDGES), st.sampled_from((-1, 0, 1, 2048, 9000)))
lengths = st.sampled_from((1, 2, 100, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 20_000, BLOCK_BYTES, BLOCK_BYTES + 1))


def page_up(offset: int) -> int:
    return -(-offset // PAGE_BYTES)


class PlainContent:
    def __init__(self) -> None:
        self.data = bytearray()
        self.written: set[int] = set()
        self.reserved: set[int] = set()
        self.filled: set[int] = set()  # of what is reserved, what was so twice

    def copy(self) -> PlainContent:
        twin = PlainContent()
        twin.data, twin.written = self.data[:], set(self.written)
        twin.reserved, twin.filled = set(self.reserved), set(self.filled)
        return twin

    def grow(self, size: int) -> None:
        self.data.extend(bytes(max(0, size - len(self.data))))

    def write(self, offset: int, data: bytes) -> None:
        self.grow(offset + len(data))
        self.data[offset : offset + len(data)] = data
        pages = set(range(offset // PAGE_BYTES, page_up(offset + len(data))))
        self.written |= pages
        self.reserved -= pages
        self.filled -= pages

    def truncate(self, size: int) -> None:
        del self.data[size:]
        self.written = {page for page in self.written if page < page_up(size)}
        self.reserved = {page for page in self.reserved if page < page_up(size)}
        self.filled &= self.reserved

    def punch(self, offset: int, length: int) -> None:
        end = min(len(self.data), offset + length)
        if end > offset:
            self.data[offset:end] = bytes(end - offset)
        pages = set(range(page_up(offset), (offset + length) // PAGE_BYTES))
        self.written -= pages
        self.reserved -= pages
        self.filled -= pages

    def reserve(self, offset: int, length: int) -> None:
        pages = set(range(offset // PAGE_BYTES, page_up(offset + length))) - self.written
        self.filled |= pages & self.reserved
        self.reserved |= pages

    def is_data(self, offset: int) -> bool:
        return offset // PAGE_BYTES in self.written | self.filled

    def find(self, offset: int, *, data: bool) -> int | None:
        while offset < len(self.data):
            if self.is_data(offset) == data:
                return offset
            offset = (offset // PAGE_BYTES + 1) * PAGE_BYTES
        return None if data else len(self.data)


class ContentMachine(RuleBasedStateMachine):
    """Several contents, some of them shared from one another, each with its model."""

    @initialize()
    def begin(self) -> None:
        self.pairs: list[tuple[Content, PlainContent]] = [(Content(), PlainContent())]
        self.stamp = 0

    def pick(self, which: int) -> tuple[Content, PlainContent]:
        return self.pairs[which % len(self.pairs)]

    @rule(which=st.integers(0, 3), offset=offsets, length=lengths, plainly=st.booleans())
    def write(self, which: int, offset: int, length: int, plainly: bool) -> None:
        content, model = self.pick(which)
        self.stamp = self.stamp % 255 + 1
        data = bytes([self.stamp]) * length
        growth = content.growth(offset, length)
        model.write(offset, data)
        done = content.write_plainly(offset, offset + length, memoryview(data), LEDGER) if plainly else -1
        assert done in {-1, growth}
        if done < 0:
            content.write(offset, data, growth)

    @rule(which=st.integers(0, 3), size=offsets)
    def truncate(self, which: int, size: int) -> None:
        content, model = self.pick(which)
        content.truncate(size)
        model.truncate(size)

    @rule(which=st.integers(0, 3), offset=offsets, length=lengths)
    def punch(self, which: int, offset: int, length: int) -> None:
        content, model = self.pick(which)
        content.punch(offset, length)
        model.punch(offset, length)

    @rule(which=st.integers(0, 3), offset=offsets, length=lengths)
    def reserve(self, which: int, offset: int, length: int) -> None:
        content, model = self.pick(which)
        before = content.pages
        added = content.reservation(offset, length)
        content.reserve(offset, length)
        model.reserve(offset, length)
        assert content.pages == before + added

    @rule(which=st.integers(0, 3), other=st.integers(0, 3))
    def share(self, which: int, other: int) -> None:
        content, model = self.pick(which)
        twin = content.share(), model.copy()
        if len(self.pairs) < 4:
            self.pairs.append(twin)
        elif self.pairs[other] is not self.pairs[which]:
            self.pairs[other] = twin

    @rule(which=st.integers(0, 3), offset=offsets, length=lengths)
    def read_a_part(self, which: int, offset: int, length: int) -> None:
        content, model = self.pick(which)
        length = max(0, min(length, len(model.data) - offset))
        assert content.read(offset, length) == model.data[offset : offset + length]

    @rule(which=st.integers(0, 3), offset=offsets)
    def seek(self, which: int, offset: int) -> None:
        content, model = self.pick(which)
        size = len(model.data)
        if offset >= size:
            return
        assert content.seek_hole(offset, size) == model.find(offset, data=False)
        expected = model.find(offset, data=True)
        if expected is None:
            with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
                content.seek_data(offset, size)
        else:
            assert content.seek_data(offset, size) == expected

    @rule(which=st.integers(0, 3), other=st.integers(0, 3))
    def compare(self, which: int, other: int) -> None:
        (content, model), (content2, model2) = self.pick(which), self.pick(other)
        assert content.same_as(content2) == (bytes(model.data).rstrip(b"\0") == bytes(model2.data).rstrip(b"\0"))

    @invariant()
    def all_agree(self) -> None:
        for content, model in self.pairs:
            content.check(len(model.data))
            assert content.read(0, len(model.data)) == model.data
            assert content.pages == len(model.written) + len(model.reserved)
            pages = {
                page
                for offset, length in content.data_ranges(len(model.data))
                for page in range(offset // PAGE_BYTES, page_up(offset + length))
            }
            assert pages == model.written


TestContent = ContentMachine.TestCase


def test_a_block_is_copied_once_for_many_writes() -> None:
    content = Content()
    content.write(0, bytes(BLOCK_BYTES), content.growth(0, BLOCK_BYTES))
    twin = content.share()
    twin.write(0, b"x", 0)
    block = twin.blocks[0]
    twin.write(1, b"y", 0)
    assert twin.blocks[0] is block
    assert content.blocks[0] is not block


def test_what_most_writes_are_is_done_in_one_step() -> None:
    content = Content()
    assert content.write_plainly(0, 1024, memoryview(bytes(1024)), LEDGER) == 1  # a new file
    assert content.write_plainly(1024, 5120, b"x" * 4096, LEDGER) == 1  # its end
    assert content.write_plainly(100, 200, b"y" * 100, LEDGER) == 0  # within
    assert content.write_plainly(0, 8192, b"z" * 8192, LEDGER) == 0  # over all of it
    assert content.write_plainly(8193, 8194, b"z", LEDGER) == -1  # would leave a gap
    assert content.write_plainly(BLOCK_BYTES - 1, BLOCK_BYTES + 1, b"zz", LEDGER) == -1  # two blocks
    assert content.read(0, 8192) == b"z" * 8192
    twin = content.share()
    assert (
        content.write_plainly(0, 1, b"a", LEDGER) == twin.write_plainly(0, 1, b"a", LEDGER) == -1
    )  # somebody else's block
