"""Retention: which snapshots to keep, by their times and tags.  Pure functions, wherever the snapshots are stored.

The rules are those of `restic forget` (internal/restic/snapshot_policy.go of restic 0.14): the snapshots are looked at
from the newest to the oldest, and each rule keeps some of them.  What no rule keeps is to be removed.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Final, NamedTuple

_PERIOD: Final = re.compile(r"(?=\d)(?:(\d+)y)?(?:(\d+)m)?(?:(\d+)d)?(?:(\d+)h)?")
_LONGEST: Final = 9999  # years, months or days


class Period(NamedTuple):
    """A length of time in units of the calendar."""

    years: int = 0
    months: int = 0
    days: int = 0
    hours: int = 0

    @classmethod
    def parse(cls, text: str) -> Period:
        """Parse a period such as "1y5m7d2h", "7d" or "36h".  ValueError."""
        match = _PERIOD.fullmatch(text)
        if match is None or not any(int(number or 0) for number in match.groups()):
            raise ValueError(f"{text!r} is not a period: write years, months, days and hours, such as 1y5m7d2h or 36h")
        period = cls(*(int(number or 0) for number in match.groups()))
        if max(period) > _LONGEST:
            raise ValueError(f"{text!r} is too long: at most {_LONGEST} of each unit")
        return period

    def __str__(self) -> str:
        return "".join(f"{number}{unit}" for number, unit in zip(self, "ymdh", strict=True) if number)

    def before(self, moment: datetime) -> int | None:
        """Return the moment that lies this period before `moment`, in microseconds since the epoch.

        None before the year 1.  A day that a month does not have is a day of the next month: one month before 31 March
        is 3 March, or 2 March in a leap year.  Hours do not depend on daylight saving time, the other units keep the
        time of day.
        """
        months = moment.year * 12 + moment.month - 1 - self.years * 12 - self.months
        try:
            first = moment.replace(year=months // 12, month=months % 12 + 1, day=1)
            same_time = first + timedelta(days=moment.day - 1 - self.days)
            return round((same_time.timestamp() - self.hours * 3600) * 1e6)
        except (ValueError, OverflowError, OSError):
            return None


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules.  A rule with 0 or None does nothing.

    `last`: the newest snapshots.  `hourly` ... `yearly`: the newest snapshot of each of the last hours ... years that
    have any.  `within`: all snapshots of that period, counted back from the newest one; `within_hourly` ...: the newest
    snapshot of each hour ... in it.  `tags`: snapshots whose tag matches one of these patterns (`fnmatch.fnmatchcase`).
    """

    last: int = 0
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0
    yearly: int = 0
    within: Period | None = None
    within_hourly: Period | None = None
    within_daily: Period | None = None
    within_weekly: Period | None = None
    within_monthly: Period | None = None
    within_yearly: Period | None = None
    tags: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether no rule keeps anything."""
        return self == Policy()


class Candidate(NamedTuple):
    """A snapshot that the policy judges.  `created_ns`: since the epoch."""

    name: str
    created_ns: int
    tag: str | None = None


class Verdict(NamedTuple):
    """The reasons why a snapshot is kept; none: it is to be removed."""

    name: str
    reasons: tuple[str, ...]


_Span = Callable[[datetime], object]  # two moments of one hour, day, ... have equal spans
_SPANS: Final[dict[str, _Span]] = {
    "hourly": lambda at: (at.year, at.month, at.day, at.hour),
    "daily": lambda at: (at.year, at.month, at.day),
    "weekly": lambda at: at.isocalendar()[:2],
    "monthly": lambda at: (at.year, at.month),
    "yearly": lambda at: at.year,
}


class _Rule:
    """Keeps the newest snapshot of each span: of the next `count` spans, or of all.

    `after`: only of snapshots later than this, in microseconds since the epoch.
    """

    def __init__(self, reason: str, span: _Span, *, count: int | None = None, after: int | None = None) -> None:
        self.reason = reason
        self._span = span
        self._left = count
        self._after = after
        self._last: object = None

    def keeps(self, at: datetime, at_us: int) -> bool:
        """Whether to keep the snapshot taken `at`.  Call it for the newest snapshot first."""
        if self._left == 0 or (self._after is not None and at_us <= self._after):
            return False
        span = self._span(at)
        if span == self._last:
            return False
        self._last = span
        if self._left is not None:
            self._left -= 1
        return True


def judge(
    policy: Policy, candidates: Iterable[Candidate], now_ns: int, zone: tzinfo | None = None
) -> Sequence[Verdict]:
    """Judge the snapshots of one workspace, and return the verdicts from the newest to the oldest.

    The calendar is that of `zone`, or of this machine's time zone.  Periods are counted back from the newest snapshot
    that is not later than `now_ns`: a snapshot that was taken while the clock was wrong must not remove all others.
    """
    newest_first = sorted(candidates, key=lambda candidate: candidate.created_ns, reverse=True)
    latest = next((_time(candidate, zone) for candidate in newest_first if candidate.created_ns <= now_ns), None)
    rules = _rules(policy, latest)
    verdicts = []
    for candidate in newest_first:
        reasons = [f"has tag {tag}" for tag in policy.tags if fnmatch.fnmatchcase(candidate.tag or "", tag)]
        # Every rule counts every snapshot, also one that another rule keeps.
        at, at_us = _time(candidate, zone), candidate.created_ns // 1000
        reasons += [rule.reason for rule in rules if rule.keeps(at, at_us)]
        verdicts.append(Verdict(candidate.name, tuple(reasons)))
    return verdicts


def _time(candidate: Candidate, zone: tzinfo | None) -> datetime:
    return datetime.fromtimestamp(candidate.created_ns // 1000 / 1e6, zone)


def _rules(policy: Policy, latest: datetime | None) -> list[_Rule]:
    def after(period: Period) -> int | None:
        return None if latest is None else period.before(latest)

    rules = []
    if policy.within is not None:
        rules.append(_Rule(f"within {policy.within}", _each, after=after(policy.within)))
    if policy.last:
        rules.append(_Rule("last snapshot", _each, count=policy.last))
    for name, span in _SPANS.items():
        if count := getattr(policy, name):
            rules.append(_Rule(f"{name} snapshot", span, count=count))
    for name, span in _SPANS.items():
        if period := getattr(policy, f"within_{name}"):
            rules.append(_Rule(f"{name} within {period}", span, after=after(period)))
    return rules


def _each(_: datetime) -> object:
    return object()  # equal to no other span
