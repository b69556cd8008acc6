"""Compaction of a journal that an upgrade gives away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import trio
import trio.testing

from vfsd.daemon.compaction import Compaction


class LargeJournal:
    """The journal of a volume that wants to be compacted, until it is given away."""

    def __init__(self) -> None:
        self.wants_image = True

    def journal_status(self) -> Any:
        raise AssertionError("the journal of another daemon")


def test_a_journal_that_was_given_away_while_the_compaction_waited_is_left_alone() -> None:
    trio.run(_wait_for_an_upgrade)


async def _wait_for_an_upgrade() -> None:
    volume = LargeJournal()
    mounted = SimpleNamespace(compaction_lock=trio.Lock())
    compaction = Compaction(cast("Any", mounted), cast("Any", volume), cast("Any", None))
    async with trio.open_nursery() as nursery:
        async with mounted.compaction_lock:
            nursery.start_soon(compaction.attend)
            with trio.fail_after(60):
                while not mounted.compaction_lock.statistics().tasks_waiting:
                    await trio.sleep(0.01)
            volume.wants_image = False
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
