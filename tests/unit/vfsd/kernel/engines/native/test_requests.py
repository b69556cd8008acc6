"""The memory into which requests are read."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from vfsd.kernel.engines.native.mounting import MAX_REQUEST_BYTES
from vfsd.kernel.engines.native.requests import BufferPool


def _resident_pages(buffer: mmap.mmap) -> int:
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    states = (ctypes.c_ubyte * -(-len(buffer) // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(buffer)), states) == 0
    return sum(state & 1 for state in states)


def test_with_a_keeper_each_page_exists_before_a_request_is_read() -> None:
    buffer = BufferPool(is_kept=True).take()
    assert _resident_pages(buffer) == -(-MAX_REQUEST_BYTES // mmap.PAGESIZE)


@pytest.mark.parametrize(("is_kept", "is_seen"), [(True, True), (False, False)])
def test_with_a_keeper_fork_does_not_make_the_pages_copies(is_kept: bool, is_seen: bool) -> None:
    buffer = BufferPool(is_kept=is_kept).take()
    child = os.fork()
    if not child:
        buffer[:1] = b"x"
        os._exit(0)
    os.waitpid(child, 0)
    assert (buffer[:1] == b"x") is is_seen


def test_buffers_are_used_again_once_they_are_given_back() -> None:
    pool = BufferPool()
    first, second = pool.take(), pool.take()
    assert first is not second
    pool.give_back(first)
    assert pool.take() is first


def test_only_a_few_spare_buffers_are_kept() -> None:
    pool = BufferPool()
    buffers = [pool.take() for _ in range(6)]
    for buffer in buffers:
        pool.give_back(buffer)
    assert sum(pool.take() in buffers for _ in range(6)) == 4
