"""invalidate_kernel_caches: the notifications, their order, and the handling of errors."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable

import pytest
import trio

from protocol.volume_extensions import CacheInvalidation, EntryChange, InodeChange
from vfsd.kernel.invalidation import invalidate_kernel_caches


class Kernel:
    """Records an engine's notifications; `refuse` returns the errno with which one fails, or 0."""

    def __init__(self, refuse: Callable[[tuple[object, ...]], int] = lambda sent: 0) -> None:
        self.sent: list[tuple[object, ...]] = []
        self.threads: set[int] = set()
        self._refuse = refuse

    def invalidate_inode(self, inode: int, *, content: bool) -> None:
        self._take(("inode", inode, content))

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        self._take(("entry", parent, name))

    def _take(self, sent: tuple[object, ...]) -> None:
        self.threads.add(threading.get_ident())
        self.sent.append(sent)
        if code := self._refuse(sent):
            raise OSError(code, "refused")


def tell(kernel: Kernel, invalidation: CacheInvalidation) -> None:
    trio.run(invalidate_kernel_caches, kernel, invalidation)


CHANGES = CacheInvalidation(
    entries=(
        EntryChange(1, b"new", 0, 10),
        EntryChange(1, b"gone", 11, 0),
        EntryChange(2, b"replaced", 12, 13),
    ),
    inodes=(InodeChange(20, content=True), InodeChange(21, content=False), InodeChange(1, content=False)),
)


def test_every_name_and_inode_is_told_once_and_directories_lose_their_listing():
    kernel = Kernel()
    tell(kernel, CHANGES)
    assert len(kernel.sent) == len(set(kernel.sent))
    assert {sent[1:] for sent in kernel.sent if sent[0] == "entry"} == {(1, b"new"), (1, b"gone"), (2, b"replaced")}
    assert {sent[1:] for sent in kernel.sent if sent[0] == "inode"} == {
        (1, True),
        (2, True),
        (10, False),
        (11, False),
        (12, False),
        (13, False),
        (20, True),
        (21, False),
    }


def test_names_go_before_inodes_and_names_that_are_gone_before_new_ones():
    kernel = Kernel()
    tell(kernel, CHANGES)
    kinds = [sent[0] for sent in kernel.sent]
    assert kinds == sorted(kinds)
    assert kernel.sent[2] == ("entry", 1, b"new")


def test_the_loop_is_never_the_sender():
    kernel = Kernel()
    tell(kernel, CHANGES)
    assert len(kernel.threads) == 1
    assert threading.get_ident() not in kernel.threads


def test_nothing_to_tell_is_nothing_sent():
    kernel = Kernel()
    tell(kernel, CacheInvalidation())
    assert kernel.sent == []


def test_what_the_kernel_does_not_know_needs_no_word(caplog):
    kernel = Kernel(refuse=lambda sent: errno.ENOENT)
    tell(kernel, CHANGES)
    assert len(kernel.sent) == 11
    assert caplog.records == []


def test_another_refusal_is_logged_once_and_stops_nothing(caplog):
    kernel = Kernel(refuse=lambda sent: errno.ENOSYS if sent[0] == "entry" else 0)
    tell(kernel, CHANGES)
    assert len(kernel.sent) == 11
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "3" in record.getMessage()
    assert "ENOSYS" in record.getMessage()


def test_a_mount_that_is_gone_is_told_no_further(caplog):
    caplog.set_level(logging.INFO)
    kernel = Kernel(refuse=lambda sent: errno.ENOTCONN)
    tell(kernel, CHANGES)
    assert len(kernel.sent) == 1
    assert "mount was removed" in caplog.text


def test_an_error_of_our_own_is_not_swallowed():
    def broken(sent: tuple[object, ...]) -> int:
        raise TypeError("a bug")

    with pytest.raises(TypeError):
        tell(Kernel(refuse=broken), CHANGES)


def test_a_hundred_thousand_changes_are_one_thread_and_each_inode_once():
    kernel = Kernel()
    entries = [EntryChange(1, b"%d" % number, number + 10, 0) for number in range(100_000)]
    tell(kernel, CacheInvalidation(entries=entries))
    assert len(kernel.threads) == 1
    assert len(kernel.sent) == 200_001


def test_it_can_be_cancelled_while_the_kernel_holds_it_back():
    released = threading.Event()

    class Stuck(Kernel):
        def _take(self, sent: tuple[object, ...]) -> None:
            released.wait(10)

    async def run() -> bool:
        with trio.move_on_after(0.01) as scope:
            await invalidate_kernel_caches(Stuck(), CHANGES)  # type: ignore[arg-type]
        released.set()
        return scope.cancelled_caught

    assert trio.run(run)
