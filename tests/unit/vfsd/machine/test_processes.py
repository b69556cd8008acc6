"""Reads of what the kernel may make wait: the others are answered."""

from __future__ import annotations

import os
import threading

import pytest

from vfsd.machine.processes import BoundedReads, UnansweredError


class Process:
    """A process whose files wait, until `go_on`."""

    def __init__(self) -> None:
        self._ours, self._theirs = os.pipe()
        self.asked: list[int] = []

    def read(self, number: int) -> int:
        self.asked.append(number)
        if number == 3:
            os.read(self._ours, 1)
        if number == 5:
            raise ProcessLookupError
        return number * 10

    def go_on(self) -> None:
        os.write(self._theirs, b"x")

    def close(self) -> None:
        os.close(self._ours)
        os.close(self._theirs)


def test_of_many_reads_those_that_wait_and_fail_are_left_out() -> None:
    process, reads = Process(), BoundedReads(0.01)
    before = set(threading.enumerate())
    assert reads.ask_each(range(8), process.read) == {0: 0, 1: 10, 2: 20, 4: 40, 6: 60, 7: 70}
    left = set(threading.enumerate()) - before
    process.go_on()
    reads.close()
    for thread in left:
        thread.join()
    assert process.asked == list(range(8)), "a read that nobody waits for any more went on with the others"
    process.close()


def test_no_more_than_some_threads_wait() -> None:
    processes, reads = [Process() for _ in range(5)], BoundedReads(0.01)
    before = set(threading.enumerate())
    for process in processes[:4]:
        with pytest.raises(UnansweredError):
            reads.ask(lambda process=process: process.read(3))  # type: ignore[misc]
    assert reads.ask_each(range(8), processes[4].read) == {}
    left = set(threading.enumerate()) - before
    for process in processes:
        process.go_on()
    for thread in left:
        thread.join()
    assert reads.ask_each(range(2), processes[4].read) == {0: 0, 1: 10}
    reads.close()
    for process in processes:
        process.close()
