"""Which snapshots a policy keeps.  `restic forget` itself is the oracle of the long test."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.store.retention import Candidate, Period, Policy, judge

BERLIN = ZoneInfo("Europe/Berlin")
NOW = datetime(2030, 1, 1, tzinfo=BERLIN)
SPANS = ("hourly", "daily", "weekly", "monthly", "yearly")


def at(text: str, tag: str | None = None) -> Candidate:
    moment = datetime.fromisoformat(text).replace(tzinfo=BERLIN)
    return Candidate(text, int(moment.timestamp()) * 10**9, tag)


def ns(moment: datetime) -> int:
    return int(moment.timestamp()) * 10**9


def kept(policy: Policy, *candidates: Candidate) -> list[str]:
    return [name for name, reasons in judge(policy, candidates, ns(NOW), BERLIN) if reasons]


def test_the_newest_snapshot_of_each_day_that_has_any_is_kept() -> None:
    days = [at("2024-03-01 08:00"), at("2024-03-01 09:00"), at("2024-03-05 01:00"), at("2024-03-09 10:00")]

    assert kept(Policy(daily=2), *days) == ["2024-03-09 10:00", "2024-03-05 01:00"]
    assert kept(Policy(daily=3), *days) == ["2024-03-09 10:00", "2024-03-05 01:00", "2024-03-01 09:00"]


def test_weeks_are_those_of_iso_8601() -> None:
    assert kept(Policy(weekly=5), at("2020-12-31 10:00"), at("2021-01-03 10:00"), at("2021-01-04 10:00")) == [
        "2021-01-04 10:00",
        "2021-01-03 10:00",
    ]


def test_a_period_counts_back_from_the_newest_snapshot_that_is_not_in_the_future() -> None:
    snapshots = [at("2024-02-28 12:00"), at("2024-02-28 12:01"), at("2024-03-01 12:00"), at("2040-01-01 00:00")]

    assert kept(Policy(within=Period(days=2)), *snapshots) == [
        "2040-01-01 00:00",
        "2024-03-01 12:00",
        "2024-02-28 12:01",
    ]


def test_a_snapshot_is_kept_for_each_rule_that_keeps_it() -> None:
    verdicts = judge(Policy(last=1, yearly=1, tags=("v*", "*1")), [at("2024-03-01 12:00", "v1")], ns(NOW), BERLIN)

    assert verdicts[0].reasons == ("has tag v*", "has tag *1", "last snapshot", "yearly snapshot")


def test_a_pattern_matches_the_whole_tag() -> None:
    tags = {"release 1": True, "a release": False, "Release": False, "": False}

    found = kept(Policy(tags=("release*",)), *(at(f"2024-03-0{n} 12:00", tag) for n, tag in enumerate(tags, 1)))

    assert found == ["2024-03-01 12:00"]


@pytest.mark.parametrize("text", ["", "0d", "1", "d", "1d1y", "-1d", "1 d", "1w", "99999y"])
def test_what_is_not_a_period_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"period|too long"):
        Period.parse(text)


def test_a_period_is_parsed_and_printed() -> None:
    assert Period.parse("1y5m7d2h") == Period(1, 5, 7, 2)
    assert str(Period.parse("7d")) == "7d"


def test_a_period_may_reach_before_the_calendar() -> None:
    assert kept(Policy(within=Period.parse("9999y")), at("2024-03-01 12:00")) == ["2024-03-01 12:00"]


@given(
    st.lists(st.integers(0, 2 * 10**9), max_size=20),
    st.builds(Policy, *[st.integers(0, 4)] * 6, within=st.none() | st.builds(Period, days=st.integers(0, 400))),
)
def test_more_is_kept_by_a_policy_with_one_more_rule(seconds: list[int], policy: Policy) -> None:
    candidates = [Candidate(str(number), second * 10**9) for number, second in enumerate(seconds)]
    wider = Policy(policy.last + 1, policy.hourly + 1, within=policy.within)
    narrow = Policy(policy.last, policy.hourly, within=policy.within)

    assert set(kept(narrow, *candidates)) <= set(kept(wider, *candidates))


# -- restic ---------------------------------------------------------------------------------------
GROUPS = 6
SNAPSHOTS = 16
POLICIES = 60


@pytest.fixture
def restic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository; times are those of Berlin."""
    assert shutil.which("restic"), "install Debian's package restic"
    monkeypatch.setenv("RESTIC_REPOSITORY", str(tmp_path / "repository"))
    monkeypatch.setenv("RESTIC_PASSWORD", "secret")
    monkeypatch.setenv("RESTIC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    subprocess.run(["restic", "init", "--quiet"], check=True)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("content")
    yield tmp_path / "source"
    monkeypatch.undo()
    time.tzset()


def _times(dice: random.Random) -> list[int]:
    """Seconds since the epoch, close together and far apart, around changes of the clock, the last in the future."""
    moment = int(dice.choice([1698535800, 1711846800, 1704063600, 1600000000]) + dice.uniform(-7200, 7200))
    found = []
    for _ in range(SNAPSHOTS):
        found.append(moment)
        moment -= int(dice.choice([60, 1800, 3600, 7200, 86400, 86400, 7 * 86400, 31 * 86400, 366 * 86400]))
    return [*found, 2524600000]


def _policy(dice: random.Random) -> Policy:
    rules: dict[str, Any] = {}
    for name in dice.sample(("last", *SPANS, "within", *(f"within_{span}" for span in SPANS)), dice.randint(1, 3)):
        if name.startswith("within"):
            rules[name] = Period(*(dice.choice([0, 0, 1, most]) for most in (3, 14, 40, 30)))
            if not any(rules[name]):
                rules[name] = Period(hours=5)
        else:
            rules[name] = dice.randint(1, 6)
    return Policy(**rules, tags=("kept",) if dice.random() < 0.3 else ())


def _forget(policy: Policy) -> dict[str, tuple[list[str], int]]:
    """The kept snapshots of each host, newest first, and the number of removed ones."""
    rules = ("last", *SPANS, "within", *(f"within_{span}" for span in SPANS))
    options = [f"--keep-{rule.replace('_', '-')}={getattr(policy, rule)}" for rule in rules if getattr(policy, rule)]
    options += [f"--keep-tag={tag}" for tag in policy.tags]
    command = ["restic", "forget", "--no-lock", "--dry-run", "--json", "--group-by=host", *options]
    groups = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    found = {}
    for group in groups:
        # Newer versions also keep the oldest snapshot while a rule has some left.
        oldest = {
            reason["snapshot"]["id"]
            for reason in group["reasons"] or []
            if all(match.startswith("oldest") for match in reason["matches"])
        }
        keep = [snapshot["time"] for snapshot in group["keep"] or [] if snapshot["id"] not in oldest]
        found[group["host"]] = keep, len(group["remove"] or []) + len(oldest)
    return found


@pytest.mark.long
def test_restic_forget_keeps_the_same_snapshots(restic: Path) -> None:
    dice = random.Random(20240)
    groups: dict[str, list[Candidate]] = {}
    for number in range(GROUPS):
        for second in _times(dice):
            text = datetime.fromtimestamp(second).isoformat(sep=" ")
            tag = "kept" if dice.random() < 0.2 else None
            # restic reads a local time.  When the clock is set back, one local time stands for two moments.
            taken = int(datetime.fromisoformat(text).timestamp())
            command = ["restic", "backup", "--quiet", "--force", f"--host=h{number}", f"--time={text}"]
            subprocess.run([*command, *([f"--tag={tag}"] if tag else []), os.fspath(restic)], check=True)
            groups.setdefault(f"h{number}", []).append(Candidate(str(taken), taken * 10**9, tag))

    for _ in range(POLICIES):
        policy = _policy(dice)
        for host, (times, removed) in _forget(policy).items():
            verdicts = judge(policy, groups[host], time.time_ns())
            found = [int(verdict.name) for verdict in verdicts if verdict.reasons]
            assert found == [int(datetime.fromisoformat(text).timestamp()) for text in times], (policy, host)
            assert len(verdicts) - len(found) == removed
