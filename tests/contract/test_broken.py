"""Broken filesystems and volumes fail the suite; so does the example of CONTRIBUTING.md without its return."""

from __future__ import annotations

import re

import pytest

from tests.contract.broken import BROKEN, BROKEN_VOLUMES
from tests.support.pages import section

pytest_plugins = ["pytester"]

SOURCE = """
import pytest
import protocol.testing
from protocol import HostMount, InMemoryFilesystem
from protocol.testing.read_only import READ_ONLY_CONTENTS
from tests.contract import broken

SUITE = getattr(protocol.testing, {suite!r})


def make(kind, directory):
    if {suite!r} != "ReadOnlyContract":
        return kind()
    for path, content in READ_ONLY_CONTENTS.items():
        (directory / path).mkdir() if content is None else (directory / path).write_bytes(content)
    return kind(mounts=[HostMount(directory)], read_only=True)


def suite_of(kind):
    @pytest.fixture
    def filesystem(self, tmp_path_factory):
        return make(kind, tmp_path_factory.mktemp("backend"))

    return type("Test" + kind.__name__, (SUITE,), dict(filesystem=filesystem))


for kind in [InMemoryFilesystem, *broken.BROKEN[{suite!r}]]:
    globals()["Test" + kind.__name__] = suite_of(kind)
"""


VOLUME_SOURCE = """
import time
import pytest
from protocol.testing import VolumeContract
from tests.contract import broken


class TestBroken(VolumeContract):
    @pytest.fixture
    def volume(self):
        def make(*, max_bytes=None, max_inodes=None, clock=None):
            return broken.{kind}(max_bytes, max_inodes, clock=clock or time.time_ns, uid=0, gid=0)

        return make

    # It takes seconds, and finds nothing here that the others do not.
    test_rm_rf_removes_each_file_while_listing = None
"""


class EndsWithTheFirstFailure:
    """Skips the rest of a filesystem's suite once the suite has noticed that it is broken."""

    def __init__(self) -> None:
        self.failed: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if kind_of(item.nodeid) in self.failed:
            pytest.skip("this filesystem has failed")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(kind_of(report.nodeid))


def kind_of(test: str) -> str:
    return test.split("::")[1].removeprefix("Test")


@pytest.mark.extended
@pytest.mark.parametrize("suite", BROKEN)
def test_every_broken_filesystem_fails_its_suite_and_a_sound_one_passes(pytester: pytest.Pytester, suite: str) -> None:
    pytester.makepyfile(SOURCE.format(suite=suite))

    # Plain: nobody reads these failures, and in CI pytest would explain each difference of long contents whole.
    ended = EndsWithTheFirstFailure()
    pytester.inline_run("-p", "no:cacheprovider", "--assert=plain", plugins=[ended])

    assert ended.failed == {kind.__name__ for kind in BROKEN[suite]}  # type: ignore[attr-defined]


@pytest.mark.extended
@pytest.mark.parametrize("kind", [kind.__name__ for kind in BROKEN_VOLUMES])
def test_a_broken_volume_fails_the_suite(pytester: pytest.Pytester, kind: str) -> None:
    pytester.makepyfile(VOLUME_SOURCE.format(kind=kind))

    # Plain: nobody reads these failures, and in CI pytest would explain each difference of long contents whole.
    result = pytester.inline_run("-p", "no:cacheprovider", "--assert=plain", "-x")

    _, _, failed = result.listoutcomes()
    assert len(failed) == 1


PAGE = section("CONTRIBUTING.md", "Contracts: a filesystem or volume of your own")


def run(pytester: pytest.Pytester, source: str) -> tuple[set[str], set[str]]:
    """The names of the tests that passed, and that failed."""
    pytester.makepyfile(source)
    reports = pytester.inline_run("-p", "no:cacheprovider").getreports("pytest_runtest_logreport")
    by_outcome: dict[str, set[str]] = {"passed": set(), "failed": set()}
    for report in reports:
        if report.when == "call":  # type: ignore[union-attr]
            name = report.nodeid.partition("::")[2].partition("[")[0]  # type: ignore[union-attr]
            by_outcome[report.outcome].add(name)  # type: ignore[union-attr]
    return by_outcome["passed"], by_outcome["failed"]


def example() -> str:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    return str(source)


@pytest.mark.extended
def test_the_example_keeps_the_contract(pytester: pytest.Pytester) -> None:
    passed, failed = run(pytester, example())
    assert failed == set()
    assert {name.partition("::")[0] for name in passed} == {"TestAudited", "TestAuditedStreams"}
    assert len(passed) > 50


@pytest.mark.extended
def test_the_example_without_its_return_fails_as_the_page_says(pytester: pytest.Pytester) -> None:
    source = example()
    assert "        return count\n" in source
    _, failed = run(pytester, source.replace("        return count\n", ""))
    (named,) = re.findall(r"`(test_\w+)` fails, among others", PAGE)
    assert f"TestAudited::{named}" in failed
