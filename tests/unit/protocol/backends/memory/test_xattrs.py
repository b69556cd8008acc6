"""The sum of an inode's attributes, which each change adapts instead of adding all of them up."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from protocol.backends.memory.xattrs import Xattrs, after_remove, after_set, content_bytes

NAMES = st.sampled_from([b"user.a", b"user.bb", b"security.capability"])


@given(st.lists(st.tuples(NAMES, st.sampled_from([None, b"", b"x", b"long" * 9])), max_size=12))
def test_the_sum_is_that_of_all_names_and_values(changes: list[tuple[bytes, bytes | None]]) -> None:
    xattrs: Xattrs | None = None
    expected: Xattrs = {}
    for name, value in changes:
        if value is not None:
            _, xattrs = after_set(0o100644, xattrs, name, value, 0)
            expected[name] = value
        else:
            with contextlib.suppress(OSError):  # there is none
                xattrs = after_remove(xattrs, name)
            expected.pop(name, None)
        assert list((xattrs or {}).items()) == list(expected.items())
        assert content_bytes(xattrs) == sum(len(key) + len(kept) for key, kept in expected.items())
