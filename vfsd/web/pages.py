"""The pages that only read: the workspaces, the timeline, the files of a state, and what differs between two states.

A page is built in bounded time and size: a directory is one level and `ENTRIES` entries, a list of changes `CHANGES`
lines.  What may take long (counting changes) gets `SOON_S` in all; then the page appears without it.  A link waits for
it, and page.js fetches what that link shows.

The first changes between two states appear before all changes are counted: the daemon sends them in the order of their
paths while it compares the states.  As soon as the lines of the page are there, the page waits only for `soon_s` more;
then the comparison is cancelled.

Threading: the event loop.  No state; a `_Window` belongs to one call.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Final, Literal, TypeVar

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from protocol.types import ChangeCounts
from vfsd.client.requests import RemoteCall
from vfsd.client.results import Change, Counts, Patch, Policy, Snapshot
from vfsd.client.timeline import Mark, Step, authors, marks, timeline
from vfsd.machine.agent_points import parse_tag
from vfsd.machine.runtime import family
from vfsd.operations.declaration import ChangeRecord
from vfsd.operations.fs import FsEntry
from vfsd.operations.snapshots import DiffParams, DiffResult
from vfsd.web.rendering import WrongRequestError, href, page
from vfsd.web.sources import Source, Sources, WorkspaceSource
from vfsd.wire.messages import wire_path
from vfsd.wire.options import BackendSpec

ENTRIES: Final = 500
CHANGES: Final = 500
STEPS: Final = 100
AUTHORS: Final = 4  # named for each state
RULES: Final = 20  # of the policy
VIEW_BYTES: Final = 128 * 1024
COMPARED_BYTES: Final = 2 << 20  # of a file whose lines are compared
SOON_S: Final = 0.2
T = TypeVar("T")


def sources_of(request: Request) -> Sources:
    """Return the sources of the application."""
    sources: Sources = request.app.state.sources
    return sources


def source_of(request: Request) -> Source:
    """Return the source that the URL names."""
    return sources_of(request).find(request.path_params["key"])


def workspace_of(request: Request) -> WorkspaceSource:
    """Return the workspace that the URL names."""
    return sources_of(request).workspace(request.path_params["key"])


def given(request: Request, name: str) -> str | None:
    """Return a parameter of the query; None if it is missing or empty."""
    return request.query_params.get(name) or None


def number(request: Request, name: str) -> int:
    """Return a parameter of the query that is a number; 0 if it is missing."""
    text = given(request, name) or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise WrongRequestError(f"{name} is not a number.")
    return int(text)


class _Patience:
    """Waits for what a page need not have: SOON_S in all, or without a limit if the user has asked to wait."""

    def __init__(self, request: Request) -> None:
        self._until = math.inf if given(request, "wait") else anyio.current_time() + SOON_S

    async def result(self, awaitable: Awaitable[T]) -> T | None:
        """Return the result, or None if it takes longer."""
        with anyio.CancelScope(deadline=self._until):
            return await awaitable
        return None


async def home(request: Request) -> Response:
    """`/`: the workspaces and the archives."""
    sources = sources_of(request)
    return page(request, "home.html", records=sources.records(), archives=sources.archives, live="/events")


# -- the timeline -----------------------------------------------------------------------------------
async def show_timeline(request: Request) -> Response:
    """`/w/KEY/`: the states, newest first, each with what it changed."""
    key = request.path_params["key"]
    if not isinstance(source_of(request), WorkspaceSource):
        return RedirectResponse(href(key, "tree"), 303)
    source = workspace_of(request)
    status = await source.status()
    steps = timeline(await source.snapshots(changes=False))
    policy = await source.policy()
    before = given(request, "before")
    start = next((at for at, step in enumerate(steps) if before is not None and step.name == before), 0)
    patience = _Patience(request)
    counted = await patience.result(source.snapshots(changes=True))
    counts = {} if counted is None else {each.name: each.changes for each in counted}
    live = await patience.result(_live_counts(source, steps[0]))
    told = await patience.result(_authors(source, steps))
    return page(
        request,
        "timeline.html",
        source=source,
        status=status,
        steps=steps[start : start + STEPS],
        older=steps[start + STEPS - 1].name if len(steps) > start + STEPS else None,
        first=start == 0,
        points={step.name: step.snapshot and parse_tag(step.snapshot.tag) for step in steps[start : start + STEPS]},
        counts=counts,
        live_counts=live,
        authors={name: [each for each, _ in found.most_common(AUTHORS + 1)] for name, found in (told or {}).items()},
        is_counted=None not in (counted, told) and (live is not None or steps[0].before is None),
        rules=_rules(policy)[: RULES + 1],
        is_hiding=bool(policy.hide),
        can_fork=BackendSpec.split(status.backend).kind in ("memory", "overlay"),
        is_overlay=_is_overlay(source),
        undo=any(each.step == -1 for each in counted or ()),
        redo=any(each.step == 1 for each in counted or ()),
        others=family(source.key, source.record.forked_from, sources_of(request).records()),
        live="/events?workspace=" + key,
        up="/",
    )


def _rules(policy: Policy) -> list[str]:
    protected = [f"protects {wire_path(os.fsencode(each))}" for each in policy.protect]
    return protected + [f"hides {wire_path(os.fsencode(each))}" for each in policy.hide]


async def _authors(source: WorkspaceSource, steps: Sequence[Step]) -> Mapping[str | None, Counter[str]]:
    try:
        return await source.run(authors(steps))
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return {}  # mounted with --no-audit


async def _live_counts(source: WorkspaceSource, live: Step) -> Counts | None:
    if live.before is None and not _is_overlay(source):
        return None
    found = await source.run(source.requests.diff(live.before, None, complete=False))
    return found.counts


def _is_overlay(source: WorkspaceSource) -> bool:
    return BackendSpec.split(source.record.backend).kind == "overlay"


async def _step(source: WorkspaceSource, name: str | None) -> tuple[Step, list[Snapshot]]:
    snapshots = await source.snapshots(changes=False)
    for step in timeline(snapshots):
        if step.name == name:
            return step, snapshots
    raise FileNotFoundError(2, f"there is no snapshot {name} (any more)")


# -- files --------------------------------------------------------------------------------------------
async def show_tree(request: Request) -> Response:
    """`/w/KEY/tree`: one directory of a state, with what changed since another state (`base`)."""
    source, path, snapshot = source_of(request), request.query_params.get("path", ""), given(request, "snapshot")
    after = given(request, "after")
    entry = await source.stat(path, snapshot)
    if entry.type != "directory":
        return RedirectResponse(href(source.key, "file", path=path, snapshot=snapshot), 303)
    listing = await source.listing(path, snapshot, after, ENTRIES)
    found: Mapping[str, Mark] | None = {}
    base, names = None, []
    if isinstance(source, WorkspaceSource):
        step, snapshots = await _step(source, snapshot)
        names = [each.name for each in snapshots]
        base = given(request, "base") or step.before
        if base is not None or _is_overlay(source):
            found = await _Patience(request).result(_marks(source, base, snapshot, path))
    here = {_name(each): each for each in listing.entries}
    removed = [name for name, mark in (found or {}).items() if mark.change == "removed" and name not in here]
    first, last = after or "", next(reversed(here), None) if listing.truncated else None
    shown_removed = [name for name in sorted(removed) if name > first and (last is None or name <= last)]
    return page(
        request,
        "tree.html",
        source=source,
        path=path,
        snapshot=snapshot,
        base=base,
        names=names,
        entries=here,
        marks=found or {},
        is_marked=found is not None,
        removed=shown_removed[:ENTRIES],
        after=last,
        live=_live(source, snapshot),
        up=_parent(source.key, "tree", path, snapshot),
        is_workspace=isinstance(source, WorkspaceSource),
    )


async def _marks(source: WorkspaceSource, base: str | None, snapshot: str | None, path: str) -> Mapping[str, Mark]:
    try:
        return await source.run(marks(base, snapshot, path))
    except FileNotFoundError:  # the directory does not exist in `base`
        return {}


def _name(entry: FsEntry) -> str:
    return entry.path.rpartition("/")[2]


def _live(source: Source, snapshot: str | None) -> str | None:
    is_live = isinstance(source, WorkspaceSource) and snapshot is None
    return f"/events?workspace={source.key}" if is_live else None


def _parent(key: str, name: str, path: str, snapshot: str | None) -> str:
    if not path:
        return href(key, "")
    return href(key, name, path=path.rpartition("/")[0] or None, snapshot=snapshot)


async def show_file(request: Request) -> Response:
    """`/w/KEY/file`: a part of a text file, or an image."""
    source, path, snapshot = source_of(request), request.query_params.get("path", ""), given(request, "snapshot")
    offset = number(request, "offset")
    entry = await source.stat(path, snapshot)
    if entry.type == "directory":
        return RedirectResponse(href(source.key, "tree", path=path, snapshot=snapshot), 303)
    text, image, size_bytes = None, None, entry.size_bytes
    if entry.type == "file":
        content, size_bytes = await source.read(path, snapshot, offset, VIEW_BYTES)
        image = image_type(content[:HEAD_BYTES]) if offset == 0 else None
        if image is None and b"\0" not in content:
            text = content.decode("utf-8", "replace")
    base = None
    if isinstance(source, WorkspaceSource):
        base = (await _step(source, snapshot))[0].before
    return page(
        request,
        "file.html",
        source=source,
        path=path,
        snapshot=snapshot,
        entry=entry,
        text=text,
        image=image,
        size_bytes=size_bytes,
        offset=offset,
        following=offset + VIEW_BYTES if offset + VIEW_BYTES < size_bytes else None,
        previous=max(0, offset - VIEW_BYTES) if offset else None,
        base=base,
        live=_live(source, snapshot),
        up=_parent(source.key, "tree", path, snapshot),
        is_workspace=isinstance(source, WorkspaceSource),
    )


# -- two states ---------------------------------------------------------------------------------------
async def show_changes(request: Request) -> Response:
    """`/w/KEY/changes`: what differs from state `a` to state `b`, at or below `path`."""
    source, path = workspace_of(request), request.query_params.get("path", "")
    a, b, start = given(request, "a"), given(request, "b"), number(request, "start")
    step, snapshots = await _step(source, b)
    a = a or step.before
    names = [each.name for each in snapshots]
    found = None
    if a is not None or _is_overlay(source):
        soon_s = None if given(request, "wait") else SOON_S
        found = await first_changes(source, a, b, path, start, CHANGES, soon_s)
    return page(
        request,
        "changes.html",
        source=source,
        path=path,
        a=a,
        b=b,
        names=names,
        can_revert=a in names[: None if b is None else names.index(b)],
        is_first=found is None,
        counts=None if found is None else found.counts,
        changes=[] if found is None else [(each.path, each) for each in found.records],
        start=start,
        following=start + CHANGES if found is not None and found.has_more else None,
        live=_live(source, b),
        up=href(source.key, ""),
    )


def _wire(change: Change) -> str:
    return wire_path(os.fsencode(change.path))


async def show_comparison(request: Request) -> Response:
    """`/w/KEY/compare`: one path in two states, side by side."""
    source, path = workspace_of(request), request.query_params.get("path", "")
    a, b = given(request, "a"), given(request, "b")
    call = source.requests.diff(a, b, complete=False)
    call.params.paths = [path]
    found = await source.run(call)
    change = next((each for each in found.changes if _wire(each) == path), None)
    images = [await _image(source, path, state) for state in (a, b)] if change is not None else [None, None]
    sizes = [] if change is None else [size for size in (change.old_size, change.new_size) if size is not None]
    rows = None
    is_small = all(size <= COMPARED_BYTES for size in sizes)
    if change is not None and change.type != "directory" and images == [None, None] and is_small:
        call_for_patch = source.requests.patch(a, b, include_git=True)
        call_for_patch.params.paths = [path]
        patch: Patch = await source.run(call_for_patch)
        rows = list(islice(side_by_side(patch), ROWS + 1))
    return page(
        request,
        "compare.html",
        source=source,
        path=path,
        a=a,
        b=b,
        change=change,
        images=images,
        rows=None if rows is None else rows[:ROWS],
        is_cut=rows is not None and len(rows) > ROWS,
        is_large=not is_small,
        live=_live(source, b),
        up=href(source.key, "changes", a=a, b=b),
    )


async def _image(source: WorkspaceSource, path: str, state: str | None) -> str | None:
    """Return the media type of an image; None if the path is something else, or does not exist in that state."""
    try:
        head, _ = await source.read(path, state, 0, HEAD_BYTES)
    except OSError:
        return None
    return image_type(head)


# -- images ----------------------------------------------------------------------------------------
HEAD_BYTES: Final = 16
_FORMATS: Final = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"))


def image_type(head: bytes) -> str | None:
    """Return the media type of an image by its first `HEAD_BYTES` bytes; None for other files."""
    for magic, media_type in _FORMATS:
        if head.startswith(magic):
            return media_type
    return "image/webp" if head[:4] == b"RIFF" and head[8:12] == b"WEBP" else None


# -- lines side by side ----------------------------------------------------------------------------
ROWS: Final = 4_000  # shown on a page
_LINE_CHARACTERS: Final = 2_000
_HUNK: Final = re.compile(rb"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")
Kind = Literal["same", "changed", "added", "removed", "gap"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line: its number and text in the old and in the new state; None where there is none.

    The row "gap" stands for lines that are the same and are left out.
    """

    kind: Kind
    old_number: int | None = None
    old: str | None = None
    new_number: int | None = None
    new: str | None = None


def side_by_side(patch: bytes) -> Iterator[Row]:
    """Yield the rows of the hunks in the patch of one file.  A binary patch has none."""
    old = new = 0
    removed: list[bytes] = []
    added: list[bytes] = []
    is_in_hunk = False
    for line in patch.split(b"\n"):
        hunk = _HUNK.match(line)
        if hunk is None and not is_in_hunk:
            continue  # the header
        if hunk is None and line[:1] == b"-":
            removed.append(line[1:])
            continue
        if hunk is None and line[:1] == b"+":
            added.append(line[1:])
            continue
        if hunk is None and line[:1] == b"\\":
            continue  # "\ No newline at end of file"
        yield from _changed(removed, added, old, new)
        old, new = old + len(removed), new + len(added)
        removed, added = [], []
        if hunk is not None:
            is_first = not old
            is_in_hunk = True
            old, new = int(hunk[1]), int(hunk[2])
            if not is_first or max(old, new) > 1:
                yield Row("gap")
        elif line[:1] == b" ":
            yield Row("same", old, _text(line[1:]), new, _text(line[1:]))
            old, new = old + 1, new + 1
        else:
            is_in_hunk = False
    yield from _changed(removed, added, old, new)


def _changed(removed: list[bytes], added: list[bytes], old: int, new: int) -> Iterator[Row]:
    for at, (before, after) in enumerate(zip_longest(removed, added)):
        if before is None:
            yield Row("added", None, None, new + at, _text(after))
        elif after is None:
            yield Row("removed", old + at, _text(before))
        else:
            yield Row("changed", old + at, _text(before), new + at, _text(after))


def _text(line: bytes) -> str:
    text = line.decode("utf-8", "replace")
    return text if len(text) <= _LINE_CHARACTERS else text[:_LINE_CHARACTERS] + " ..."


# -- the first changes -----------------------------------------------------------------------------
@dataclass(slots=True)
class FirstChanges:
    """A part of the list of changes.  `counts` is None if counting takes longer; `has_more`: others follow."""

    records: list[ChangeRecord] = field(default_factory=list)
    counts: ChangeCounts | None = None
    has_more: bool = False


async def first_changes(
    source: WorkspaceSource, a: str | None, b: str | None, path: str, start: int, most: int, soon_s: float | None
) -> FirstChanges:
    """Return up to `most` of the changes from state `a` to state `b` at or below `path`, without the first `start`.

    Waits for the lines of the list, and up to `soon_s` in all for the counts; None: as long as they take.  Errors as
    for `WorkspaceSource.run`.
    """
    found = FirstChanges()
    with anyio.CancelScope() as scope:
        began = anyio.current_time()

        def cut() -> None:
            scope.deadline = began + (math.inf if soon_s is None else soon_s)

        params = DiffParams(a=a, b=b, paths=[path] if path else [], stream=True)
        window = _Window(found, start, most, cut)
        call: RemoteCall[DiffResult] = RemoteCall("diff", params, on_output=window.feed)
        found.counts = (await source.run(call)).counts
    return found


class _Window:
    """Takes the lines of a stream of `ChangeRecord`s that follow the first `start`; decodes no others."""

    def __init__(self, found: FirstChanges, start: int, most: int, on_full: Callable[[], None]) -> None:
        self._found: Final = found
        self._most: Final = most
        self._on_full: Final = on_full
        self._to_skip = start
        self._rest = b""
        self._decode: Final = msgspec.json.Decoder(ChangeRecord).decode

    def feed(self, output: bytes) -> None:
        """Take the next piece of the output, which may end within a line."""
        if self._found.has_more:
            return
        *lines, self._rest = (self._rest + output).split(b"\n")
        skipped = min(self._to_skip, len(lines))
        self._to_skip -= skipped
        wanted = self._most - len(self._found.records)
        following = lines[skipped:]
        self._found.records += map(self._decode, following[:wanted])
        if len(following) > wanted:
            self._found.has_more = True
            self._rest = b""
            self._on_full()
