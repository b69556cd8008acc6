"""A volume that breaks its contract fails the suite."""

from __future__ import annotations

import pytest

from tests.contract.broken_volumes import BROKEN

pytest_plugins = ["pytester"]

SOURCE = """
import time
import pytest
from protocol.testing import VolumeContract
from tests.contract import broken_volumes


class TestBroken(VolumeContract):
    @pytest.fixture
    def volume(self):
        def make(*, max_bytes=None, max_inodes=None, clock=None):
            return broken_volumes.{kind}(max_bytes, max_inodes, clock=clock or time.time_ns, uid=0, gid=0)

        return make

    # It takes seconds, and finds nothing here that the others do not.
    test_rm_rf_removes_each_file_while_listing = None
"""


@pytest.mark.extended
@pytest.mark.parametrize("kind", [kind.__name__ for kind in BROKEN])
def test_a_broken_volume_fails_the_suite(pytester: pytest.Pytester, kind: str) -> None:
    pytester.makepyfile(SOURCE.format(kind=kind))

    # Plain: nobody reads these failures, and in CI pytest would explain each difference of long contents whole.
    result = pytester.inline_run("-p", "no:cacheprovider", "--assert=plain", "-x")

    _, _, failed = result.listoutcomes()
    assert len(failed) == 1
