"""The pages that exchange changes with something else: merge and adopt a fork, apply or discard an overlay's changes.

A GET shows what would happen, as a dry run.  A POST with the token of the form does it.

Threading: as in `actions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, cast

from starlette.requests import Request
from starlette.responses import Response

from vfsd.client.requests import RemoteCall
from vfsd.client.results import Applied, Merged, Restored
from vfsd.machine.text import counted
from vfsd.web.actions import complete, count_words, done, kept, listed, problem_lines
from vfsd.web.forms import fields
from vfsd.web.pages import sources_of, workspace_of
from vfsd.web.problems import WrongRequestError
from vfsd.web.rendering import href, page
from vfsd.web.sources import WorkspaceSource
from vfsd.wire.messages import from_wire_path

_POLICIES: Final = ("fail", "ours", "theirs", "markers")


# -- forks --------------------------------------------------------------------------------------------
async def confirm_merge(request: Request) -> Response:
    """GET `/w/KEY/merge`: show what a merge would change, and its conflicts."""
    source, other, policy = workspace_of(request), request.query_params.get("fork", ""), _policy(request.query_params)
    sources_of(request).workspace(other)
    found = await source.run(source.requests.merge(other, conflicts=policy, dry_run=True))
    return page(
        request,
        "merge.html",
        source=source,
        fork=other,
        policy=policy,
        policies=_POLICIES,
        counts=found.counts,
        changes=listed(found.changes),
        conflicts=_conflicts(found),
        can_merge=policy != "fail" or not found.conflicts,
        up=href(source.key, ""),
    )


async def merge(request: Request) -> Response:
    """POST `/w/KEY/merge`: merge a fork."""
    form = await fields(request)
    source, other = workspace_of(request), form.get("fork", "")
    sources_of(request).workspace(other)
    merged = await complete(source, source.requests.merge(other, conflicts=_policy(form)))
    return _done(request, source, merged, f"Merged {other}", with_conflicts=True)


def _policy(given: Mapping[str, str]) -> Literal["fail", "ours", "theirs", "markers"]:
    policy = given.get("conflicts") or "fail"
    if policy not in _POLICIES:
        raise WrongRequestError("conflicts is fail, ours, theirs or markers.")
    return cast("Literal['fail', 'ours', 'theirs', 'markers']", policy)


def _conflicts(found: Merged) -> list[str]:
    return problem_lines({path: f"{each.reason}: {each.detail}" for path, each in found.conflicts.items()})


def _done(request: Request, source: WorkspaceSource, found: Merged, what: str, *, with_conflicts: bool) -> Response:
    title = f"{what}: {count_words(found.counts)}."
    if not found.applied:
        title = f"Nothing was changed: {counted(len(found.conflicts), 'conflict')} with {found.fork}."
    return done(
        request,
        source,
        title=title,
        counts=found.counts if found.applied else None,
        changes=listed(found.changes) if found.applied else [],
        notes=[*kept(found.safety_snapshot), *(_conflicts(found) if with_conflicts or not found.applied else [])],
        undo=found.undo_steps > 0 and found.safety_snapshot is not None,
    )


async def confirm_adopt(request: Request) -> Response:
    """GET `/w/KEY/adopt`: show what it would change to make the workspace equal to a fork, and what would be lost."""
    source, other = workspace_of(request), request.query_params.get("fork", "")
    sources_of(request).workspace(other)
    found = await source.run(source.requests.adopt(other, force=True, dry_run=True))
    return page(
        request,
        "adopt.html",
        source=source,
        fork=other,
        counts=found.counts,
        changes=listed(found.changes),
        conflicts=_conflicts(found),
        up=href(source.key, ""),
    )


async def adopt(request: Request) -> Response:
    """POST `/w/KEY/adopt`: make the workspace equal to a fork; with `force`, changes of its own are replaced."""
    form = await fields(request)
    source, other = workspace_of(request), form.get("fork", "")
    sources_of(request).workspace(other)
    found = await complete(source, source.requests.adopt(other, force=_force(form)))
    return _done(request, source, found, f"Adopted {other}", with_conflicts=False)


def _force(form: Mapping[str, str]) -> bool:
    return form.get("force") == "yes"


# -- overlays -----------------------------------------------------------------------------------------
def _paths(given: Mapping[str, str]) -> list[bytes]:
    path = given.get("path", "")
    return [from_wire_path(path)] if path else []


async def confirm_apply(request: Request) -> Response:
    """GET `/w/KEY/apply`: show what would be written to the directory below an overlay."""
    source = workspace_of(request)
    found = await source.run(source.requests.apply(_paths(request.query_params), dry_run=True))
    return page(
        request,
        "overlay.html",
        source=source,
        kind="apply",
        path=request.query_params.get("path", ""),
        directory=found.directory,
        counts=found.counts,
        changes=listed(found.changes),
        conflicts=problem_lines(found.conflicts),
        up=href(source.key, ""),
    )


async def apply(request: Request) -> Response:
    """POST `/w/KEY/apply`: write the changes to the directory; with `force`, over changes that others made there."""
    form = await fields(request)
    source = workspace_of(request)
    call: RemoteCall[Applied] = source.requests.apply(_paths(form), force=_force(form))
    found: Applied = await complete(source, call)
    title = f"Applied to {found.directory}: {count_words(found.counts)}."
    if not found.applied:
        title = f"Nothing was written to {found.directory}: {counted(len(found.conflicts), 'conflict')}."
    return done(
        request,
        source,
        title=title,
        counts=found.counts if found.applied else None,
        changes=listed(found.changes) if found.applied else [],
        notes=[*([found.recovered] if found.recovered else []), *problem_lines(found.conflicts)],
    )


async def confirm_discard(request: Request) -> Response:
    """GET `/w/KEY/discard`: show which changes of an overlay would be discarded."""
    source = workspace_of(request)
    found = await source.run(source.requests.discard(_paths(request.query_params), dry_run=True))
    return page(
        request,
        "overlay.html",
        source=source,
        kind="discard",
        path=request.query_params.get("path", ""),
        directory=None,
        counts=found.counts,
        changes=listed(found.changes),
        conflicts=[],
        up=href(source.key, ""),
    )


async def discard(request: Request) -> Response:
    """POST `/w/KEY/discard`: show the directory below the overlay again."""
    form = await fields(request)
    source = workspace_of(request)
    found: Restored = await complete(source, source.requests.discard(_paths(form)))
    return done(
        request,
        source,
        title=f"Discarded: {count_words(found.counts)}.",
        counts=found.counts,
        changes=listed(found.changes),
        notes=[*kept(found.safety_snapshot), *problem_lines(found.problems)],
        undo=found.undo_steps > 0 and found.safety_snapshot is not None,
    )
