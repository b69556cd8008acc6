"""Points in time as users type them."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from vfsd.cli.history import ACCEPTED, parse_time

NOW = datetime(2026, 3, 10, 14, 30, 20).astimezone()


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("90s", timedelta(seconds=90)),
        ("10m", timedelta(minutes=10)),
        ("2h", timedelta(hours=2)),
        ("2h ago", timedelta(hours=2)),
        ("1.5 hours", timedelta(minutes=90)),
        ("2 hours ago", timedelta(hours=2)),
        ("2.hours.ago", timedelta(hours=2)),
        ("an hour ago", timedelta(hours=1)),
        ("a day ago", timedelta(days=1)),
        ("3 Days", timedelta(days=3)),
        ("1 week ago", timedelta(weeks=1)),
        ("1h30m", timedelta(minutes=90)),
        ("1 hour, 30 minutes ago", timedelta(minutes=90)),
        ("now", timedelta()),
    ],
)
def test_an_age_counts_back_from_now(text: str, ago: timedelta) -> None:
    assert parse_time(text, NOW) == NOW - ago


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("today", "2026-03-10T00:00:00"),
        (" Yesterday ", "2026-03-09T00:00:00"),
        ("10:30", "2026-03-10T10:30:00"),
        ("at 9:05:07", "2026-03-10T09:05:07"),
        ("14:31", "2026-03-09T14:31:00"),  # today it has not been yet
        ("today 14:31", "2026-03-10T14:31:00"),
        ("yesterday 10:30", "2026-03-09T10:30:00"),
        ("yesterday at 10:30", "2026-03-09T10:30:00"),
        ("2026-01-31", "2026-01-31T00:00:00"),
        ("2026-01-31 12:00", "2026-01-31T12:00:00"),
        ("2026-01-31T12:00:05", "2026-01-31T12:00:05"),
    ],
)
def test_days_and_times_of_day_are_local(text: str, local: str) -> None:
    assert parse_time(text, NOW) == datetime.fromisoformat(local).astimezone()


def test_a_time_with_a_zone_is_that_of_the_zone() -> None:
    assert parse_time("2026-01-31T12:00Z", NOW) == datetime.fromisoformat("2026-01-31T12:00:00+00:00")


@pytest.mark.parametrize(
    "text", ["", "before", "ago", "h", "2 parsecs", "25:00", "10:61", "turn-3", "9999999999 weeks", "2h3"]
)
def test_anything_else_is_not_a_time(text: str) -> None:
    assert parse_time(text, NOW) is None


def test_everything_that_the_help_lists_is_accepted() -> None:
    for text in ACCEPTED.replace(" or ", ", ").split(", "):
        assert parse_time(text.strip("'"), NOW) is not None, text
