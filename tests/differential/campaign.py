"""Campaign: episode after episode of random calls; each difference is reduced, and reported once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.differential.calls import Call
from tests.differential.compare import Bench
from tests.differential.known import Difference
from tests.differential.script import reduce

__all__ = ["Campaign", "Finding", "reduced"]

_TREE_EVERY = 100
_TRIES = 3
_CHECK_EVERY = 50  # episodes


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference, and the fewest calls that show it."""

    episode: int
    difference: Difference
    calls: Sequence[Call]


class Campaign:
    """Runs episodes on `bench`; the same seed gives the same calls."""

    def __init__(self, bench: Bench, seed: int, *, episode_calls: int = 400, reduce_failures: bool = True) -> None:
        self._bench = bench
        self._seed = seed
        self._episode_calls = episode_calls
        self._reduce = reduce_failures
        self.calls = 0
        self.findings: list[Finding] = []
        self.passing: list[Difference] = []  # came once, and not again

    def run(self, calls: int, first: int = 0) -> Iterator[Finding | None]:
        """Make at least `calls` calls; yields after each episode what was found in it."""
        episode = first
        while self.calls < calls:
            yield self._episode(episode)
            episode += 1
            if episode % _CHECK_EVERY == 0:
                self._bench.check()
        self._bench.check()

    def _episode(self, episode: int) -> Finding | None:
        chance = random.Random(f"{self._seed}-{episode}")
        calls = self._bench.calls(chance, self._episode_calls)
        difference = self._bench.run(calls, tree_every=_TREE_EVERY)
        if difference is None:
            self.calls += len(calls)
            return None
        self.calls += difference.index + 1
        calls = calls[: difference.index + 1]
        if self._reduce:
            small = reduced(self._bench, calls, difference)
            if small is None and difference.may_pass:
                self.passing.append(difference)
                return None
            difference, calls = small or (difference, calls)
        finding = Finding(episode, difference, calls)
        self.findings.append(finding)
        return finding


def reduced(bench: Bench, calls: Sequence[Call], difference: Difference) -> tuple[Difference, list[Call]] | None:
    """The fewest calls that show a difference of the same kind, and that one; None where it does not come again."""
    last = difference

    def fails(part: Sequence[Call]) -> bool:
        nonlocal last
        found = bench.run(part, tree_every=1 if difference.operation == "tree" else None)
        if found is None or found.signature != difference.signature:
            return False
        last = found
        return True

    if not any(fails(calls) for _ in range(_TRIES)):
        return None
    small = reduce(calls, fails)
    return last, small
