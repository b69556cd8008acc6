"""Random operations on a memory volume with a journal: a replay gives the same volume at each moment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from protocol.backends.memory import MemoryVolume
from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.lower import AbsentLower
from tests.model.test_memory_model import MemoryMachine
from tests.model.test_overlay_model import OverlayMachine
from tests.support.journals import (
    JournalInMemory,
    assert_same_changes,
    assert_same_volume,
    load_all,
    replayed,
    replayed_over,
)

_REPLAYED_EVERY = 6  # steps


class JournalMachine(MemoryMachine):
    """The operations of the memory model; the journal begins, with an image, after the first ones."""

    journal: JournalInMemory | None = None
    steps = 0

    @invariant()
    def the_journal_has_everything(self) -> None:
        self.steps += 1
        if self.journal is None:
            if self.steps > 1:
                self.journal = JournalInMemory()
                self.journal.keep(self.volume)
        elif self.steps % _REPLAYED_EVERY == 0:
            self.compare_with_journal()

    @rule()
    def compact(self) -> None:
        """Replace the journal by a new one, which begins with an image."""
        if self.journal is None:
            return
        self.compare_with_journal()
        self.volume.end_journal()
        self.journal = JournalInMemory()
        self.journal.keep(self.volume)
        self.compare_with_journal()

    @rule(value=st.binary(max_size=5))
    def note(self, value: bytes) -> None:
        self.volume.note("key", value)

    def compare_with_journal(self) -> None:
        assert self.journal is not None
        self.volume.flush_journal()
        again = self.replayed(self.journal.batches())
        again.check_invariants()
        self.assert_same(again)

    def replayed(self, batches: list[list[bytes]]) -> MemoryVolume:
        return replayed(batches)

    def assert_same(self, again: Any) -> None:
        assert_same_volume(self.volume, again)

    def teardown(self) -> None:
        if self.journal is not None:
            self.compare_with_journal()
        super().teardown()


class OverlayJournalMachine(JournalMachine, OverlayMachine):
    """The same for an overlay: a replay reads nothing from the directory, and shows all of it afterwards."""

    is_over = False

    def replayed(self, batches: list[list[bytes]]) -> OverlayVolume:
        return replayed_over(self.below if self.is_over else AbsentLower(), batches)

    def assert_same(self, again: Any) -> None:
        if not self.is_over:
            assert_same_changes(self.volume, again)
            return
        for volume in (self.volume, again):
            load_all(volume)
            volume.check_invariants()
        assert_same_volume(self.volume, again)
        with self.volume.base_tree() as one, again.base_tree() as other:
            assert list(one.walk()) == list(other.walk())

    def teardown(self) -> None:
        self.is_over = True
        super().teardown()


TestOverlayJournalModel = OverlayJournalMachine.TestCase
TestOverlayJournalModel.settings = settings(max_examples=max(5, settings().max_examples // 2), stateful_step_count=40)
TestOverlayJournalModel.pytestmark = [pytest.mark.timeout(3600)]
TestJournalModel = JournalMachine.TestCase
TestJournalModel.settings = settings(max_examples=2 * settings().max_examples, stateful_step_count=40)
TestJournalModel.pytestmark = [pytest.mark.timeout(3600)]
