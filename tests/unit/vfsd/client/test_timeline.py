"""The timeline of a workspace, and the marks of a directory, from changes that arrive in pieces of any size."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from vfsd.client.results import Snapshot
from vfsd.client.timeline import Mark, authors, marks, timeline

NAMES = st.sampled_from(["a", "b", "a-b", "\\\\x", "é"])
PATHS = st.lists(st.lists(NAMES, min_size=1, max_size=4).map("/".join), unique=True, max_size=20)


def snapshot(name: str) -> Snapshot:
    return Snapshot(name, datetime.now(UTC), 0, 0, 0)


def test_the_live_state_is_first_and_each_state_has_the_one_before_it() -> None:
    steps = timeline([snapshot("one"), snapshot("two")])
    assert [(step.name, step.before) for step in steps] == [(None, "two"), ("two", "one"), ("one", None)]
    assert [(step.name, step.before) for step in timeline([])] == [(None, None)]


@given(paths=PATHS, directory=st.sampled_from(["", "a", "a/b"]), size=st.integers(1, 200))
def test_marks_count_the_changes_at_and_below_each_entry(paths: list[str], directory: str, size: int) -> None:
    prefix = f"{directory}/" if directory else ""
    inside = [path for path in paths if path.startswith(prefix)]
    lines = [
        json.dumps({"path": path, "change": "added", "type": "file"}).encode() + b"\n" for path in [directory, *inside]
    ]
    output = b"".join(lines if directory else lines[1:])
    call = marks("one", None, directory)
    assert call.on_output is not None
    for start in range(0, len(output), size):
        call.on_output(output[start : start + size])
    found = call.result(None)
    rest = [path.removeprefix(prefix).partition("/") for path in inside]
    below = Counter(name for name, slash, _ in rest if slash)
    own = {name for name, slash, _ in rest if not slash}
    assert {name: mark.below for name, mark in found.items()} == {name: below[name] for name in below.keys() | own}
    assert {name for name, mark in found.items() if mark.change == "added"} == own
    assert all(isinstance(mark, Mark) for mark in found.values())


@given(size=st.integers(1, 300))
def test_authors_are_counted_for_the_state_that_their_changes_led_to(size: int) -> None:
    times = [datetime(2026, 1, 1, hour, tzinfo=UTC) for hour in (1, 2)]
    one, two = (Snapshot(name, time, 0, 0, 0) for name, time in zip(("one", "two"), times, strict=True))
    lines = [
        {"time": "2026-01-01T00:30:00.000001+00:00", "process": {"name": "cp", "pid": 3}, "number": 1},
        {"time": "2026-01-01T00:30:00+00:00", "until": "2026-01-01T01:30:00+00:00", "process": {"name": "cp"}},
        {"time": "2026-01-01T01:40:00+00:00", "process": {"name": "sh"}, "label": "Bash 7"},
        {"time": "2026-01-01T03:00:00+00:00"},
        {"time": "2026-01-01T03:00:00+00:00", "process": {"name": "git"}},
    ]
    output = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    call = authors(timeline([one, two]))
    assert call.on_output is not None
    for start in range(0, len(output), size):
        call.on_output(output[start : start + size])
    assert call.result(None) == {"one": {"cp": 1}, "two": {"cp": 1, "Bash 7": 1}, None: {"git": 1}}
