"""Random operations on a memory volume with a journal: a replay gives the same volume at each moment."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from tests.model.test_memory_model import MemoryMachine
from tests.support.journals import JournalInMemory, assert_same_volume, replayed

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
            self.compare()

    @rule()
    def compact(self) -> None:
        """Replace the journal by a new one, which begins with an image."""
        if self.journal is None:
            return
        self.compare()
        self.volume.end_journal()
        self.journal = JournalInMemory()
        self.journal.keep(self.volume)
        self.compare()

    @rule(value=st.binary(max_size=5))
    def note(self, value: bytes) -> None:
        self.volume.note("key", value)

    def compare(self) -> None:
        assert self.journal is not None
        again = replayed(self.journal.batches())
        again.check_invariants()
        assert_same_volume(self.volume, again)

    def teardown(self) -> None:
        if self.journal is not None:
            self.compare()
        super().teardown()


TestJournalModel = JournalMachine.TestCase
TestJournalModel.settings = settings(max_examples=2 * settings().max_examples, stateful_step_count=40)
TestJournalModel.pytestmark = [pytest.mark.timeout(3600)]
