"""The search tools: glob and grep."""

from __future__ import annotations

from typing import Final

from protocol.paths import encode
from protocol.search.grep import grep_tree
from protocol.search.walk import SKIP_NOTHING, USUAL_SKIPS, SkipRules, UnreadablePaths, glob_paths
from protocol.tool_messages import GlobParams, GlobResult, GrepHit, GrepParams, GrepResult, UnreadablePath
from protocol.tools.base import Tool, ToolContext
from protocol.tools.files import Shown, below

LINE_CHARACTERS: Final = 1_000  # of a matching line
UNREADABLE_SHOWN: Final = 10  # unreadable paths that the text for a model names


def _skips(everything: bool) -> SkipRules:
    return SKIP_NOTHING if everything else USUAL_SKIPS


def _unreadable(found: UnreadablePaths, shown: Shown) -> tuple[UnreadablePath, ...]:
    return tuple(UnreadablePath(path=shown(each.path) or ".", reason=each.reason) for each in found.named)


def _unreadable_lines(result: GlobResult | GrepResult) -> list[str]:
    lines = [f"(not searched: {each.path}: {each.reason})" for each in result.unreadable[:UNREADABLE_SHOWN]]
    if result.unreadable_count > UNREADABLE_SHOWN:
        lines.append(f"(not searched either: {result.unreadable_count - UNREADABLE_SHOWN} more unreadable paths)")
    return lines


# -- glob -----------------------------------------------------------------------------------------
def _glob(params: GlobParams, context: ToolContext) -> GlobResult:
    with below(params.path, context) as (tree, start, shown):
        found = glob_paths(
            tree,
            params.pattern,
            path=start,
            limit=params.limit,
            skip=_skips(params.everything),
            keep_going=context.keep_going,
        )
        return GlobResult(
            paths=[shown(path) for path in found.paths],
            truncated=found.truncated,
            unreadable=_unreadable(found.unreadable, shown),
            unreadable_count=found.unreadable.count,
        )


def _render_glob(result: GlobResult) -> str:
    lines = list(result.paths) or ["no file matches"]
    if result.truncated:
        lines.append(f"(the first {len(result.paths)}; there are more: narrow the pattern, or set a larger limit)")
    return "\n".join(lines + _unreadable_lines(result))


GLOB: Final = Tool(
    name="glob",
    description=(
        "Find files by name. Hidden directories, node_modules, __pycache__, vendor and binary files are left out "
        "unless everything is set."
    ),
    params=GlobParams,
    result=GlobResult,
    run=_glob,
    rendering=_render_glob,
)


# -- grep -----------------------------------------------------------------------------------------
def _grep(params: GrepParams, context: ToolContext) -> GrepResult:
    with below(params.path, context) as (tree, start, shown):
        found = grep_tree(
            tree,
            params.pattern,
            path=start,
            glob=params.glob,
            max_matches=params.limit,
            max_line_characters=LINE_CHARACTERS,
            skip=_skips(params.everything),
            ignore_case=params.ignore_case,
            keep_going=context.keep_going,
        )
        hits = [
            GrepHit(
                path=shown(encode(match.path)),
                line_number=match.line_number,
                line=match.line_content,
                match_start=match.match_start,
                match_end=match.match_end,
            )
            for match in found.matches
        ]
        return GrepResult(
            matches=hits,
            truncated=found.truncated,
            unreadable=_unreadable(found.unreadable, shown),
            unreadable_count=found.unreadable.count,
        )


def _render_grep(result: GrepResult) -> str:
    lines: list[str] = []
    path = None
    for hit in result.matches:
        if hit.path != path:
            path = hit.path
            lines.append(path)
        lines.append(f"{hit.line_number:6}\t{hit.line.rstrip(chr(13))}")
    if not lines:
        lines.append("no line matches")
    if result.truncated:
        lines.append(
            f"(the first {len(result.matches)} lines; there are more: narrow the search, or set a larger limit)"
        )
    return "\n".join(lines + _unreadable_lines(result))


GREP: Final = Tool(
    name="grep",
    description=(
        "Find lines by a regular expression; gives the file, line numbers and lines. Hidden directories, "
        "node_modules, __pycache__ and vendor are left out unless everything is set; binary files always."
    ),
    params=GrepParams,
    result=GrepResult,
    run=_grep,
    rendering=_render_grep,
)
