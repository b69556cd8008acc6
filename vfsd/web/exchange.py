"""The pages that exchange changes with something else: merge and adopt a fork, apply or discard an overlay's changes.

A GET shows what would happen, as a dry run.  A POST with the token of the form does it.

Threading: as in `actions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, cast

from starlette.requests import Request
from starlette.responses import Response

from vfsd.client.requests import RemoteCall
from vfsd.client.results import Applied, Merged, Restored
from vfsd.machine.text import counted
from vfsd.web.actions import changed, complete, confirm, count_words, done, listed, older_lines, problem_lines
from vfsd.web.forms import fields
from vfsd.web.pages import sources_of, workspace_of
from vfsd.web.problems import WrongRequestError
from vfsd.web.sources import WorkspaceSource
from vfsd.wire.messages import from_wire_path

_POLICIES: Final = ("fail", "ours", "theirs", "markers")


def _force(form: Mapping[str, str]) -> bool:
    return form.get("force") == "yes"


def _touch(form: Mapping[str, str]) -> bool:
    return form.get("touch") == "yes"


# -- forks --------------------------------------------------------------------------------------------
def _pair(request: Request, given: Mapping[str, str]) -> tuple[WorkspaceSource, str]:
    """Return the workspace that the URL names, and the name of the fork in `given`, which is a running workspace."""
    other = given.get("fork", "")
    return workspace_of(request), sources_of(request).workspace(other).key


async def confirm_merge(request: Request) -> Response:
    """GET `/w/KEY/merge`: show what a merge would change, and its conflicts."""
    policy = _policy(request.query_params)
    source, fork = _pair(request, request.query_params)
    found = await source.run(source.requests.merge(fork, conflicts=policy, dry_run=True))
    return confirm(
        request,
        "merge.html",
        source,
        found,
        fork=fork,
        policy=policy,
        policies=_POLICIES,
        conflicts=[*_conflicts(found), *_repositories(found)],
        can_merge=policy != "fail" or not found.conflicts,
    )


async def merge(request: Request) -> Response:
    """POST `/w/KEY/merge`: merge a fork."""
    form = await fields(request)
    source, fork = _pair(request, form)
    found = await complete(source, source.requests.merge(fork, conflicts=_policy(form), touch=_touch(form)))
    return await _merged(request, source, found, f"Merged {fork}", [*_conflicts(found), *_repositories(found)])


def _policy(given: Mapping[str, str]) -> Literal["fail", "ours", "theirs", "markers"]:
    policy = given.get("conflicts") or "fail"
    if policy not in _POLICIES:
        raise WrongRequestError("conflicts is fail, ours, theirs or markers.")
    return cast("Literal['fail', 'ours', 'theirs', 'markers']", policy)


def _conflicts(found: Merged) -> list[str]:
    return problem_lines({path: f"{each.reason}: {each.detail}" for path, each in found.conflicts.items()})


def _repositories(found: Merged | Applied) -> list[str]:
    lines = problem_lines({path: each.detail for path, each in found.repositories.items()})
    return [*lines, *(command for each in found.repositories.values() for command in each.commands)]


async def _merged(
    request: Request, source: WorkspaceSource, found: Merged, what: str, notes: Sequence[str] = ()
) -> Response:
    if found.applied:
        return await changed(request, source, what, found, notes)
    title = f"Nothing was changed: {counted(len(found.conflicts), 'conflict')} with {found.fork}."
    return done(request, source, title=title, notes=_conflicts(found))


async def confirm_adopt(request: Request) -> Response:
    """GET `/w/KEY/adopt`: show what it would change to make the workspace equal to a fork, and what would be lost."""
    source, fork = _pair(request, request.query_params)
    found = await source.run(source.requests.adopt(fork, force=True, dry_run=True))
    return confirm(request, "adopt.html", source, found, fork=fork, conflicts=_conflicts(found))


async def adopt(request: Request) -> Response:
    """POST `/w/KEY/adopt`: make the workspace equal to a fork; with `force`, changes of its own are replaced."""
    form = await fields(request)
    source, fork = _pair(request, form)
    found = await complete(source, source.requests.adopt(fork, force=_force(form), touch=_touch(form)))
    return await _merged(request, source, found, f"Adopted {fork}")


# -- overlays -----------------------------------------------------------------------------------------
def _paths(given: Mapping[str, str]) -> list[bytes]:
    path = given.get("path", "")
    return [from_wire_path(path)] if path else []


async def confirm_apply(request: Request) -> Response:
    """GET `/w/KEY/apply`: show what would be written to the directory below an overlay."""
    source = workspace_of(request)
    found = await source.run(source.requests.apply(_paths(request.query_params), dry_run=True))
    return _confirm_overlay(request, source, "apply", found, found.directory, problem_lines(found.conflicts))


async def confirm_discard(request: Request) -> Response:
    """GET `/w/KEY/discard`: show which changes of an overlay would be discarded."""
    source = workspace_of(request)
    found = await source.run(source.requests.discard(_paths(request.query_params), dry_run=True))
    return _confirm_overlay(request, source, "discard", found)


def _confirm_overlay(
    request: Request,
    source: WorkspaceSource,
    kind: Literal["apply", "discard"],
    found: Applied | Restored,
    directory: str | None = None,
    conflicts: Sequence[str] = (),
) -> Response:
    path = request.query_params.get("path", "")
    values = {"kind": kind, "path": path, "directory": directory, "conflicts": conflicts}
    return confirm(request, "overlay.html", source, found, **values)


async def apply(request: Request) -> Response:
    """POST `/w/KEY/apply`: write the changes to the directory; with `force`, over changes that others made there."""
    form = await fields(request)
    source = workspace_of(request)
    call: RemoteCall[Applied] = source.requests.apply(_paths(form), force=_force(form), touch=_touch(form))
    found: Applied = await complete(source, call)
    problems = problem_lines({**found.conflicts, **found.problems})
    notes = [
        *([found.recovered] if found.recovered else []),
        *older_lines(found.older),
        *problems,
        *_repositories(found),
    ]
    if not found.applied:
        title = f"Nothing was written to {found.directory}: {counted(len(found.conflicts), 'conflict')}."
        return done(request, source, title=title, notes=notes)
    title = f"Applied to {found.directory}: {count_words(found.counts)}."
    return done(request, source, title=title, counts=found.counts, changes=listed(found.changes), notes=notes)


async def discard(request: Request) -> Response:
    """POST `/w/KEY/discard`: show the directory below the overlay again."""
    form = await fields(request)
    source = workspace_of(request)
    found: Restored = await complete(source, source.requests.discard(_paths(form), touch=_touch(form)))
    return await changed(request, source, "Discarded", found, problem_lines(found.problems))
