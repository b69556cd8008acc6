"""Points in time as a user types them: an age, a day, a time of day, or ISO 8601.  No state."""

from __future__ import annotations

import re
from datetime import datetime, time, timedelta
from typing import Final

ACCEPTED: Final = "2h, '2 hours ago', today, yesterday, 10:30, 'yesterday 10:30', 2026-01-31 or 2026-01-31T10:30"

_SECONDS: Final = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86_400),
    **dict.fromkeys(("w", "week", "weeks"), 604_800),
}
_DAYS_AGO: Final = {"today": 0, "yesterday": 1}
# git's documentation writes 2.weeks.ago, which needs no quotes in a shell.
_AMOUNT: Final = re.compile(r"(\d+(?:\.\d+)?|an?\b)[\s.]*([a-z]+)[\s.,]*")
_CLOCK: Final = re.compile(r"(?:(today|yesterday)(?:\s+at)?\s+|at\s+)?(\d{1,2}):(\d\d)(?::(\d\d))?")


def parse_time(text: str, now: datetime) -> datetime | None:
    """Return the time that `text` means at `now`, which has a time zone; None if it is not a time.

    Days and times of day are local.  A time of day without a day is the last time that it was.  The words are those
    that `git log --since` takes, as far as ACCEPTED lists them.
    """
    words = " ".join(text.lower().split())
    try:
        return _age(words, now) or _day(words, now) or datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        return None


def _age(words: str, now: datetime) -> datetime | None:
    """Parse one or more amounts, such as `1h30m` or `2 hours ago`."""
    text = words.removesuffix("ago").rstrip(" .")
    seconds, at = 0.0, 0
    while at < len(text):
        amount = _AMOUNT.match(text, at)
        if amount is None or amount[2] not in _SECONDS:
            return None
        seconds += (1 if amount[1].startswith("a") else float(amount[1])) * _SECONDS[amount[2]]
        at = amount.end()
    return now - timedelta(seconds=seconds) if at else None


def _day(words: str, now: datetime) -> datetime | None:
    """Parse a named day, a time of day, or both."""
    if words == "now":
        return now
    if words in _DAYS_AGO:
        return _local(now, _DAYS_AGO[words], time())
    clock = _CLOCK.fullmatch(words)
    if clock is None:
        return None
    at = time(int(clock[2]), int(clock[3]), int(clock[4] or 0))
    found = _local(now, _DAYS_AGO.get(clock[1], 0), at)
    return _local(now, 1, at) if clock[1] is None and found > now else found


def _local(now: datetime, days_ago: int, at: time) -> datetime:
    return datetime.combine(now.date() - timedelta(days=days_ago), at).astimezone()
