"""A volume that breaks its contract fails the suite."""

from __future__ import annotations

import pytest

from tests.contract.broken_volumes import BROKEN

pytest_plugins = ["pytester"]

SOURCE = """
import time
import pytest
from protocol.backends.memory import MemoryVolume
from protocol.testing import VolumeContract
from tests.contract import broken_volumes


def suite_of(kind):
    @pytest.fixture
    def volume(self):
        def make(*, max_bytes=None, max_inodes=None, clock=None):
            return kind(max_bytes, max_inodes, clock=clock or time.time_ns, uid=0, gid=0)

        return make

    # It takes seconds, and finds nothing here that the others do not.
    return type("Test" + kind.__name__, (VolumeContract,), dict(
        volume=volume, test_rm_rf_of_20_000_files_removes_each_while_listing=None))


for kind in [MemoryVolume, *broken_volumes.BROKEN]:
    globals()["Test" + kind.__name__] = suite_of(kind)
"""


def test_every_broken_volume_fails_the_suite_and_a_sound_one_passes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SOURCE)

    # Plain: nobody reads these failures, and in CI pytest would explain each difference of long contents whole.
    reports = pytester.inline_run("-p", "no:cacheprovider", "--assert=plain").getreports("pytest_runtest_logreport")

    failed = {report.nodeid.split("::")[1] for report in reports if report.failed}  # type: ignore[union-attr]
    assert failed == {"Test" + kind.__name__ for kind in BROKEN}
    assert any(report.passed and "::TestMemoryVolume::" in report.nodeid for report in reports)  # type: ignore[union-attr]
