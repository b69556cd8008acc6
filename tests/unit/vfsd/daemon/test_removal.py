"""The removal of what was made for a workspace: its order, and what the answer to an unmount says."""

from __future__ import annotations

import trio
import trio.testing

from vfsd.daemon.removal import Removal


def run_removal(steps: list[str], *, is_used: bool) -> str | None:
    """Remove while a connection is kept and a command runs, and note each end in `steps`; return the answer."""

    def discard() -> str:
        steps.append("removed")
        return "it stays"

    async def attend(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            steps.append("disconnected")

    async def end_commands() -> None:
        steps.append("commands ended")

    async def main() -> str | None:
        removal = Removal(discard)
        async with trio.open_nursery() as nursery:
            await nursery.start(removal.connect, attend)
            nursery.start_soon(lambda: removal.run(end_commands, is_used=is_used))
            answer = await removal.wait()
            nursery.cancel_scope.cancel()
        return answer

    return trio.run(main)


def test_commands_and_the_connection_end_before_the_container_is_removed_and_the_answer_says_what_stays() -> None:
    steps: list[str] = []
    assert run_removal(steps, is_used=True) == "it stays"
    assert steps == ["commands ended", "disconnected", "removed"]


def test_a_start_that_is_undone_removes_nothing_that_was_there_before() -> None:
    steps: list[str] = []
    assert run_removal(steps, is_used=False) is None
    assert "removed" not in steps


def test_the_answer_does_not_wait_for_ever_and_not_at_all_if_there_is_nothing_to_remove() -> None:
    async def main(removal: Removal) -> str | None:
        return await removal.wait()

    clock = trio.testing.MockClock(autojump_threshold=0)
    assert "still being removed" in (trio.run(main, Removal(lambda: None), clock=clock) or "")
    assert trio.run(main, Removal(None)) is None
