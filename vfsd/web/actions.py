"""The pages that change something: snapshot, restore, undo, redo, drop, fork and merge.

A GET shows what would happen: a restore, an undo and a merge as a dry run.  A POST with the token of the form does it,
and leads to a page with the outcome, which offers to undo it.  A restore names the time of its snapshot as well, so a
snapshot that took over the name meanwhile is not restored.

Threading: the event loop.  A change is completed even if the browser leaves meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC
from typing import Any, Final, Literal, cast

import anyio
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from vfsd.client.mount_arguments import fork_target
from vfsd.client.requests import RemoteCall
from vfsd.client.results import Change, Counts, Merged, Restored
from vfsd.client.threads import finish
from vfsd.machine.text import counted
from vfsd.web.forms import Outcomes, fields
from vfsd.web.pages import given, sources_of, workspace_of
from vfsd.web.problems import WrongRequestError
from vfsd.web.rendering import href, page
from vfsd.web.sources import WorkspaceSource
from vfsd.wire.messages import from_wire_path, wire_path

_LISTED: Final = 500
_POLICIES: Final = ("fail", "ours", "theirs", "markers")


def _outcomes(request: Request) -> Outcomes:
    outcomes: Outcomes = request.app.state.outcomes
    return outcomes


def _done(request: Request, source: WorkspaceSource, **outcome: Any) -> Response:
    values = {"changes": [], "counts": None, "notes": [], "undo": False, "link": None, **outcome}
    name = _outcomes(request).keep(values)
    return RedirectResponse(href(source.key, "done", outcome=name), 303)


async def show_done(request: Request) -> Response:
    """`/w/KEY/done`: the outcome of a change."""
    source = workspace_of(request)
    outcome = _outcomes(request).find(given(request, "outcome") or "")
    if outcome is None:
        return RedirectResponse(href(source.key, ""), 303)
    return page(request, "done.html", source=source, up=href(source.key, ""), **outcome)


def _listed(changes: tuple[Change, ...]) -> list[tuple[str, Change]]:
    return [(wire_path(os.fsencode(change.path)), change) for change in changes[:_LISTED]]


def _count_words(counts: Counts) -> str:
    parts = ((counts.added, "added"), (counts.modified, "modified"), (counts.removed, "removed"))
    return ", ".join(f"{count:,} {word}" for count, word in parts if count) or "no changes"


def _problem_lines(problems: Mapping[str, object]) -> list[str]:
    lines = [f"{wire_path(os.fsencode(path))}: {reason}" for path, reason in list(problems.items())[:_LISTED]]
    more = len(problems) - len(lines)
    return [*lines, f"and {more:,} more"] if more > 0 else lines


# -- snapshots ----------------------------------------------------------------------------------------
async def take_snapshot(request: Request) -> Response:
    """POST `/w/KEY/snapshot`: take a snapshot."""
    form = await fields(request)
    source = workspace_of(request)
    taken = await _complete(source, source.requests.snapshot(form.get("name") or None, tag=form.get("tag") or None))
    notes = [f"{wire_path(os.fsencode(path))} could not be read, and is not in it" for path in taken.unreadable]
    notes += [f"{wire_path(os.fsencode(path))} changed while it was read" for path in taken.unstable]
    title = f"Snapshot {taken.name} was taken: {counted(taken.files, 'file')}."
    return _done(request, source, title=title, notes=notes[:_LISTED])


async def confirm_drop(request: Request) -> Response:
    """GET `/w/KEY/drop`: ask whether to drop a snapshot."""
    source = workspace_of(request)
    found = await source.snapshot(given(request, "snapshot") or "")
    return page(request, "drop.html", source=source, snapshot=found, up=href(source.key, ""))


async def drop(request: Request) -> Response:
    """POST `/w/KEY/drop`: drop a snapshot."""
    form = await fields(request)
    source = workspace_of(request)
    name = form.get("snapshot", "")
    await _check_created(source, name, form)
    await _complete(source, source.requests.drop(name))
    return _done(request, source, title=f"Snapshot {name} was dropped.")


async def _check_created(source: WorkspaceSource, name: str, form: Mapping[str, str]) -> None:
    """FileNotFoundError if the snapshot is not the one that the form was made for."""
    found = await source.snapshot(name)
    if found.created_at.isoformat() != form.get("created_at"):
        raise FileNotFoundError(2, f"the snapshot {name} was replaced by another one of the same name")


# -- restore ------------------------------------------------------------------------------------------
async def _restore_call(source: WorkspaceSource, given: Mapping[str, str], *, dry_run: bool) -> RemoteCall[Restored]:
    """Build the request of a restore, an undo or a redo."""
    kind, path = given.get("kind", "restore"), given.get("path", "")
    paths = [from_wire_path(path)] if path else []
    if kind == "undo":
        return source.requests.undo(paths, dry_run=dry_run)
    if kind == "redo":
        return source.requests.redo(dry_run=dry_run)
    if kind != "restore":
        raise WrongRequestError("kind is restore, undo or redo.")
    name = given.get("snapshot", "")
    if not dry_run:
        await _check_created(source, name, given)
    call = source.requests.restore(name, paths, dry_run=dry_run)
    if not dry_run:
        created_at = (await source.snapshot(name)).created_at.astimezone(UTC)
        call.params.created_at = created_at.isoformat(timespec="milliseconds")
    return call


async def confirm_restore(request: Request) -> Response:
    """GET `/w/KEY/restore`: show what a restore, an undo or a redo would change."""
    source = workspace_of(request)
    found = await source.run(await _restore_call(source, request.query_params, dry_run=True))
    kind = given(request, "kind") or "restore"
    snapshot = await source.snapshot(request.query_params.get("snapshot", "")) if kind == "restore" else None
    return page(
        request,
        "restore.html",
        source=source,
        kind=kind,
        path=request.query_params.get("path", ""),
        snapshot=snapshot,
        target=found.source,
        counts=found.counts,
        changes=_listed(found.changes),
        up=href(source.key, ""),
    )


async def restore(request: Request) -> Response:
    """POST `/w/KEY/restore`: restore, undo or redo."""
    form = await fields(request)
    source = workspace_of(request)
    done = await _complete(source, await _restore_call(source, form, dry_run=False))
    what = {"undo": f"Undid {done.step}", "redo": f"Redid {done.step}"}.get(
        form.get("kind", "restore"), f"Restored {form.get('path') or 'everything'} from {done.source}"
    )
    return _done(
        request,
        source,
        title=f"{what}: {_count_words(done.counts)}.",
        counts=done.counts,
        changes=_listed(done.changes),
        notes=[*_kept(done.safety_snapshot), *_problem_lines(done.problems)],
        undo=done.undo_steps > 0 and done.safety_snapshot is not None,
    )


def _kept(safety_snapshot: str | None) -> list[str]:
    return [] if safety_snapshot is None else [f"The state before is kept as {safety_snapshot}."]


# -- forks --------------------------------------------------------------------------------------------
async def ask_fork(request: Request) -> Response:
    """GET `/w/KEY/fork`: ask where to mount a fork."""
    source = workspace_of(request)
    snapshot = given(request, "snapshot")
    if snapshot is not None:
        await source.snapshot(snapshot)
    proposed = wire_path(os.fsencode(f"{source.record.mountpoint}-fork"))
    return page(request, "fork.html", source=source, snapshot=snapshot, proposed=proposed, up=href(source.key, ""))


async def fork(request: Request) -> Response:
    """POST `/w/KEY/fork`: make a fork."""
    form = await fields(request)
    source = workspace_of(request)
    place = os.fsdecode(from_wire_path(form.get("mountpoint", "")))
    if not os.path.isabs(place):
        raise WrongRequestError("The directory of the fork must be an absolute path.")
    target = fork_target(place, form.get("name") or None)
    chosen, mountpoint = await finish(target.__enter__)
    try:
        made = await _complete(source, source.requests.fork(chosen, mountpoint, form.get("snapshot") or None))
    except BaseException as error:
        kind, raised = type(error), error
        with anyio.CancelScope(shield=True):
            await finish(lambda: target.__exit__(kind, raised, None))
        raise
    title = f"The fork {made.name} is mounted at {wire_path(os.fsencode(made.mountpoint))}."
    return _done(request, source, title=title, notes=list(made.warnings), link=(made.name, href(made.name, "")))


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
        changes=_listed(found.changes),
        conflicts=_conflicts(found),
        can_merge=policy != "fail" or not found.conflicts,
        up=href(source.key, ""),
    )


async def merge(request: Request) -> Response:
    """POST `/w/KEY/merge`: merge a fork."""
    form = await fields(request)
    source, other = workspace_of(request), form.get("fork", "")
    sources_of(request).workspace(other)
    done = await _complete(source, source.requests.merge(other, conflicts=_policy(form)))
    title = f"Merged {other}: {_count_words(done.counts)}."
    if not done.applied:
        title = f"Nothing was changed: {counted(len(done.conflicts), 'conflict')} with {other}."
    return _done(
        request,
        source,
        title=title,
        counts=done.counts if done.applied else None,
        changes=_listed(done.changes) if done.applied else [],
        notes=[*_kept(done.safety_snapshot), *_conflicts(done)],
        undo=done.undo_steps > 0 and done.safety_snapshot is not None,
    )


def _policy(given: Mapping[str, str]) -> Literal["fail", "ours", "theirs", "markers"]:
    policy = given.get("conflicts") or "fail"
    if policy not in _POLICIES:
        raise WrongRequestError("conflicts is fail, ours, theirs or markers.")
    return cast("Literal['fail', 'ours', 'theirs', 'markers']", policy)


def _conflicts(found: Merged) -> list[str]:
    return _problem_lines({path: f"{each.reason}: {each.detail}" for path, each in found.conflicts.items()})


async def _complete(source: WorkspaceSource, call: RemoteCall[Any]) -> Any:
    """Make a change; a browser that leaves does not cancel it."""
    with anyio.CancelScope(shield=True):
        return await source.change(call)
