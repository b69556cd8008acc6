"""When a keeper gives up."""

from __future__ import annotations

import time

import pytest

from vfsd.daemon.keeper.keeping import ANSWERED, SERVING_NS, deaths_in_a_row, shared_memory


@pytest.mark.parametrize(
    ("answered", "served_s", "deaths"),
    [(0, None, 4), (0, 1, 4), (1, 1, 0), (0, 61, 0)],
    ids=["it never served", "it answered nothing", "it answered something", "nobody used it"],
)
def test_a_daemon_that_did_its_work_ends_a_row_of_deaths(answered: int, served_s: int | None, deaths: int) -> None:
    _, memory = shared_memory()
    memory[ANSWERED] = answered
    if served_s is not None:
        memory[SERVING_NS] = max(1, time.monotonic_ns() - served_s * 10**9)
    assert deaths_in_a_row(memory, 3) == deaths
    assert deaths_in_a_row(memory, deaths) == deaths + 1  # of the next daemon, which did nothing yet
