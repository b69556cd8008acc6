"""docs/contracts.md is true: its example passes, and fails as the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[2] / "docs" / "contracts.md"


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
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
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
    (named,) = re.findall(r"`(test_\w+)` fails, among others", PAGE.read_text(encoding="utf-8"))
    assert f"TestAudited::{named}" in failed
