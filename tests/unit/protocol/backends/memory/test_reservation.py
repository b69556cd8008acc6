"""Memory that a volume reserves for a while, as the reading of an archive's manifest does."""

from __future__ import annotations

import errno

import pytest

from protocol.backends.memory import MemoryVolume

MIB = 1 << 20


@pytest.mark.parametrize("is_lent", [False, True])
def test_what_is_reserved_is_charged_until_the_end_and_never_beyond_the_limit(is_lent: bool) -> None:
    volume = MemoryVolume(max_memory=8 * MIB)
    reader = volume
    if is_lent:
        reader = volume.new_stage()
    before = volume.usage().overhead_bytes
    with reader.reserving() as reserve:
        reserve(3 * MIB)
        reserve(2 * MIB)
        assert volume.usage().overhead_bytes - before >= 5 * MIB - 4096
        with pytest.raises(OSError, match="No space") as refused:
            reserve(4 * MIB)
        assert refused.value.errno == errno.ENOSPC
    assert volume.usage().overhead_bytes - before < 4096
    if is_lent:
        reader.give_back()
    assert volume.usage().overhead_bytes == before
    volume.check_invariants()


def test_without_a_limit_everything_can_be_reserved() -> None:
    volume = MemoryVolume()
    before = volume.usage().overhead_bytes
    with volume.reserving() as reserve:
        reserve(1 << 40)
    assert volume.usage().overhead_bytes == before
