"""vfsd.machine.agent_points: the tag of an agent's snapshot is read back as it was written, whatever the agent sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.volume_extensions import TAG_MAX_BYTES
from vfsd.machine.agent_points import AGENTS, KINDS, AgentPoint, parse_tag, snapshot_name

ANY_TEXT = st.text(st.characters(), max_size=400)


def members(point: AgentPoint) -> tuple[str, ...]:
    return point.agent, point.kind, point.session, point.prompt, point.tool_use_id, point.text


@given(st.sampled_from(list(AGENTS)), st.sampled_from(KINDS), ANY_TEXT, ANY_TEXT, ANY_TEXT, ANY_TEXT)
def test_a_tag_is_read_back_as_it_was_written(
    agent: str, kind: str, session: str, prompt: str, tool: str, text: str
) -> None:
    point = AgentPoint(agent, kind, session, prompt, tool, text)
    tag = point.tag()
    assert tag.isprintable()
    assert len(tag.encode()) <= TAG_MAX_BYTES
    found = parse_tag(tag)
    assert found is not None
    assert members(found) == members(point)


def test_the_longest_tag_fits() -> None:
    longest = "x" * 100
    tag = AgentPoint(max(AGENTS, key=len), "prompt", longest, longest, longest, "\U0001f600" * 1000).tag()
    assert len(tag.encode()) <= TAG_MAX_BYTES


def test_ids_are_kept_and_the_text_becomes_one_line() -> None:
    point = AgentPoint("claude", "tool", "s-1", "p-1", "toolu_1", "Bash: a\n\tb")
    assert point.tag() == "claude:tool session=s-1 prompt=p-1 id=toolu_1: Bash: a b"


@pytest.mark.parametrize("tag", [None, "", "a remark", "claude", "claude:other: x", "other:tool: x", "claude: tool"])
def test_other_tags_are_no_points(tag: str | None) -> None:
    assert parse_tag(tag) is None


@pytest.mark.parametrize(
    ("tool_use_id", "name"),
    [("toolu_01", "toolu_01"), ("", None), ("_x", None), ("a_b.zip", None), ("3", None), ("../x", None)],
)
def test_a_snapshot_is_named_after_the_call_of_a_tool_if_that_is_a_name(tool_use_id: str, name: str | None) -> None:
    assert snapshot_name(AgentPoint("claude", "tool", tool_use_id=tool_use_id)) == name
