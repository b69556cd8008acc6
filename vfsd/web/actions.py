"""The pages that change something: snapshot, restore, undo, redo, revert, drop, fork, merge, adopt, apply, discard; and
`show_conflicts`, which shows what merges would conflict.

A GET shows what would happen: a restore, an undo, a merge and a revert as a dry run.  A POST with the token of the form
does it, and leads to a page with the outcome, which offers to undo it.  A restore, an undo and a redo name the time of
the state that they go to, so a snapshot that took over the name meanwhile is not restored, and a form that is sent
twice, or from two tabs, does not undo two steps.

Threading: the event loop.  A change is completed even if the browser leaves meanwhile.  No await between two accesses
of `Outcomes`.
"""

from __future__ import annotations

import os
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Final, Literal, cast
from urllib.parse import parse_qsl

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response

from vfsd.client.arguments import fork_target
from vfsd.client.async_connection import finish
from vfsd.client.requests import RemoteCall
from vfsd.client.results import Applied, Change, Conflicts, Merged, Pair, Restored, Reverted
from vfsd.machine.text import count_words, counted, older_note
from vfsd.web.access import Credentials
from vfsd.web.pages import given, sources_of, workspace_of
from vfsd.web.rendering import WrongRequestError, href, page
from vfsd.web.sources import WorkspaceSource
from vfsd.wire.messages import from_wire_path, wire_path

_LISTED: Final = 500


def _outcomes(request: Request) -> Outcomes:
    outcomes: Outcomes = request.app.state.outcomes
    return outcomes


def done(request: Request, source: WorkspaceSource, **outcome: Any) -> Response:
    """Lead to a page with the outcome of a change: what `done.html` shows."""
    values = {"changes": [], "counts": None, "notes": [], "back": None, "link": None, **outcome}
    name = _outcomes(request).keep(values)
    return RedirectResponse(href(source.key, "done", outcome=name), 303)


async def show_done(request: Request) -> Response:
    """`/w/KEY/done`: the outcome of a change."""
    source = workspace_of(request)
    outcome = _outcomes(request).find(given(request, "outcome") or "")
    if outcome is None:
        return RedirectResponse(href(source.key, ""), 303)
    return page(request, "done.html", source=source, up=href(source.key, ""), **outcome)


def listed(changes: tuple[Change, ...]) -> list[tuple[str, Change]]:
    """Return the first changes, with their wire paths."""
    return [(wire_path(os.fsencode(change.path)), change) for change in changes[:_LISTED]]


def problem_lines(problems: Mapping[str, object]) -> list[str]:
    """Return a line for each of the first problems by path, and one for the rest."""
    lines = [f"{wire_path(os.fsencode(path))}: {reason}" for path, reason in list(problems.items())[:_LISTED]]
    more = len(problems) - len(lines)
    return [*lines, f"and {more:,} more"] if more > 0 else lines


def confirm(
    request: Request,
    template: str,
    source: WorkspaceSource,
    found: Restored | Merged | Reverted | Applied,
    action: str,
    **values: Any,
) -> Response:
    """Show what a change would do, `found` by a dry run, and ask whether to make it by a POST to the page `action`.

    `values`: of the template, and of confirm.html: `hidden` fields, `conflicts`, the words next to the box `force`.
    """
    shown: dict[str, Any] = {"counts": found.counts, "changes": listed(found.changes), "up": href(source.key, "")}
    shown |= {"action": action, "verb": action.capitalize(), "is_possible": found.counts.total > 0}
    return page(request, template, **{"source": source, "conflicts": (), "force": "", **shown, **values})


# -- snapshots ----------------------------------------------------------------------------------------
async def take_snapshot(request: Request) -> Response:
    """POST `/w/KEY/snapshot`: take a snapshot."""
    form = await fields(request)
    source = workspace_of(request)
    taken = await complete(source, source.requests.snapshot(form.get("name") or None, tag=form.get("tag") or None))
    notes = [f"{wire_path(os.fsencode(path))} could not be read, and is not in it" for path in taken.unreadable]
    notes += [f"{wire_path(os.fsencode(path))} changed while it was read" for path in taken.unstable]
    title = f"Snapshot {taken.name} was taken: {counted(taken.files, 'file')}."
    return done(request, source, title=title, notes=notes[:_LISTED])


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
    call = source.requests.drop(name)
    call.params.created_at = {name: _created_at(form)}
    await _complete_on_snapshot(source, call, name)
    return done(request, source, title=f"Snapshot {name} was dropped.")


def _created_at(form: Mapping[str, str]) -> str:
    """Return when the snapshot that the form was made for was taken, as the daemon writes it."""
    try:
        return datetime.fromisoformat(form.get("created_at", "")).astimezone(UTC).isoformat(timespec="milliseconds")
    except ValueError:
        raise WrongRequestError("created_at is the time of the snapshot.") from None


async def _complete_on_snapshot(source: WorkspaceSource, call: RemoteCall[Any], name: str) -> Any:
    """Do as `complete`; an error says whether the snapshot is gone, or replaced by another one of the same name."""
    try:
        return await complete(source, call)
    except FileNotFoundError as error:
        if error.filename != name:
            raise
        await source.snapshot(name)
        raise FileNotFoundError(2, f"the snapshot {name} was replaced by another one of the same name") from None


# -- restore ------------------------------------------------------------------------------------------
def _restore_call(source: WorkspaceSource, given: Mapping[str, str], *, dry_run: bool) -> RemoteCall[Restored]:
    """Build the request of a restore, an undo or a redo."""
    kind, paths = given.get("kind", "restore"), _paths(given)
    if kind == "undo":
        call = source.requests.undo(paths, dry_run=dry_run)
    elif kind == "redo":
        call = source.requests.redo(dry_run=dry_run)
    elif kind == "restore":
        call = source.requests.restore(given.get("snapshot", ""), paths, dry_run=dry_run)
    else:
        raise WrongRequestError("kind is restore, undo or redo.")
    if not dry_run:
        call.params.source.created_at = _created_at(given)
        call.params.touch = _touch(given)
    return call


async def confirm_restore(request: Request) -> Response:
    """GET `/w/KEY/restore`: show what a restore, an undo or a redo would change."""
    source = workspace_of(request)
    found = await source.run(_restore_call(source, request.query_params, dry_run=True))
    kind, target = given(request, "kind") or "restore", await source.snapshot(found.source)
    hidden = {"kind": kind, "path": request.query_params.get("path", ""), "created_at": target.created_at.isoformat()}
    if kind == "restore":
        hidden["snapshot"] = target.name
    values = {"verb": kind.capitalize(), "target": target, "hidden": hidden}
    return confirm(request, "restore.html", source, found, "restore", **values)


async def restore(request: Request) -> Response:
    """POST `/w/KEY/restore`: restore, undo or redo."""
    form = await fields(request)
    source = workspace_of(request)
    call = _restore_call(source, form, dry_run=False)
    found = await _complete_on_snapshot(source, call, form.get("snapshot", ""))
    what, problems = f"Restored {form.get('path') or 'everything'} from {found.source}", problem_lines(found.problems)
    if found.step is None:  # not one of the history, which would be undone or redone as a whole
        return await changed(request, source, what, found, problems)
    if form.get("kind") == "redo":
        return await changed(request, source, f"Redid {found.step}", found, problems)
    return await changed(request, source, f"Undid {found.step}", found, problems, back="redo")


def older_lines(older: int, advice: str = "undo, and choose the present time") -> list[str]:
    """Say how many files are older than what they replaced, and what to do then; nothing if there are none."""
    return [f"{older_note(older, advice)}."] if older else []


async def changed(
    request: Request,
    source: WorkspaceSource,
    what: str,
    found: Restored | Merged | Reverted,
    notes: Sequence[str] = (),
    *,
    back: Literal["undo", "redo"] = "undo",
) -> Response:
    """Lead to a page that says `what` was done to the workspace, and offers to go back."""
    safety = found.safety_snapshot
    return done(
        request,
        source,
        title=f"{what}: {count_words(found.counts)}.",
        counts=found.counts,
        changes=listed(found.changes),
        notes=[
            *([] if safety is None else [f"The state before is kept as {safety}."]),
            *older_lines(found.older),
            *notes,
        ],
        back=None if safety is None else await _way_back(source, back, safety),
    )


async def _way_back(source: WorkspaceSource, kind: Literal["undo", "redo"], safety: str) -> tuple[str, str] | None:
    """Return the kind of step that leads to the state before a change, and its time; None if it was dropped."""
    try:
        return kind, (await source.snapshot(safety)).created_at.isoformat()
    except OSError:
        return None


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
        made = await complete(source, source.requests.fork(chosen, mountpoint, form.get("snapshot") or None))
    except BaseException as error:
        kind, raised = type(error), error
        with anyio.CancelScope(shield=True):
            await finish(lambda: target.__exit__(kind, raised, None))
        raise
    title = f"The fork {made.name} is mounted at {wire_path(os.fsencode(made.mountpoint))}."
    return done(request, source, title=title, notes=list(made.warnings), link=(made.name, href(made.name, "")))


async def complete(source: WorkspaceSource, call: RemoteCall[Any]) -> Any:
    """Make a change; a browser that leaves does not cancel it."""
    with anyio.CancelScope(shield=True):
        return await source.change(call)


# -- forms and outcomes ----------------------------------------------------------------------------
_BODY_BYTES: Final = 64 * 1024
_BODY_S: Final = 30
_FIELDS: Final = 50
_KEPT: Final = 64
_MEDIA_TYPE: Final = "application/x-www-form-urlencoded"


async def fields(request: Request) -> Mapping[str, str]:
    """Return the fields of a form that this server sent.  HTTPException (403) without its token."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _MEDIA_TYPE:
        raise HTTPException(415, f"A change is a form: {_MEDIA_TYPE}.")
    try:
        with anyio.fail_after(_BODY_S):
            body = await _body(request)
    except TimeoutError:
        raise HTTPException(408, "The form did not arrive completely.") from None
    except ClientDisconnect:
        raise HTTPException(400, "The browser left before the form had arrived.") from None
    try:
        pairs = parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_FIELDS)
    except ValueError:
        raise WrongRequestError("The form is not readable.") from None
    found = {name: value.replace("\r\n", "\n") for name, value in pairs}
    credentials: Credentials = request.app.state.credentials
    if not credentials.is_form_token(found.get("form_token", "")):
        raise HTTPException(403, "The form is of another run of `vfsd web`: go back, reload the page, and try again.")
    return found


async def _body(request: Request) -> bytes:
    body = b""
    async with aclosing(request.stream()) as pieces:
        async for piece in pieces:
            body += piece
            if len(body) > _BODY_BYTES:
                raise HTTPException(413, "The form is too long.")
    return body


class Outcomes:
    """The results of the last changes, which the page that follows a change shows.

    A change is answered with a redirect to its outcome, so that reloading that page does not repeat the change.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Mapping[str, Any]] = OrderedDict()

    def keep(self, outcome: Mapping[str, Any]) -> str:
        """Keep an outcome, and return its name.  The oldest ones are dropped."""
        name = secrets.token_urlsafe(8)
        self._kept[name] = outcome
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return name

    def find(self, name: str) -> Mapping[str, Any] | None:
        """Return an outcome; None if it was dropped."""
        return self._kept.get(name)


_POLICIES: Final = {
    "fail": "change nothing",
    "ours": "keep the present version",
    "theirs": "take the other version",
    "markers": "write both, with markers",
}


def _force(form: Mapping[str, str]) -> bool:
    return form.get("force") == "yes"


def _touch(form: Mapping[str, str]) -> bool:
    return form.get("touch") == "yes"


# -- merges, adoptions and reverts ---------------------------------------------------------------------
async def show_conflicts(request: Request) -> Response:
    """GET `/w/KEY/conflicts`: which workspaces of the family change the same paths, and which merges would conflict."""
    source = workspace_of(request)
    found: Conflicts = await source.run(source.requests.conflicts())
    return page(
        request,
        "conflicts.html",
        source=source,
        names=found.workspaces,
        pairs={(pair.a, pair.b): pair for pair in found.pairs},
        lines=_conflicts,
        below=problem_lines(found.below or {}),
        up=href(source.key, ""),
    )


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
        "merge",
        title=f"Merge {fork} into {source.title}?",
        label="Paths that both changed",
        hidden={"fork": fork, "conflicts": policy},
        policies={**_POLICIES, "ours": f"keep {source.title}", "theirs": f"take {fork}"},
        conflicts=[*_conflicts(found), *_repositories(found)],
        is_possible=_is_possible(found, policy),
    )


async def merge(request: Request) -> Response:
    """POST `/w/KEY/merge`: merge a fork."""
    form = await fields(request)
    source, fork = _pair(request, form)
    found = await complete(source, source.requests.merge(fork, conflicts=_policy(form), touch=_touch(form)))
    return await _merged(request, source, found, fork, f"Merged {fork}", [*_conflicts(found), *_repositories(found)])


def _policy(given: Mapping[str, str]) -> Literal["fail", "ours", "theirs", "markers"]:
    policy = given.get("conflicts") or "fail"
    if policy not in _POLICIES:
        raise WrongRequestError("conflicts is fail, ours, theirs or markers.")
    return cast("Literal['fail', 'ours', 'theirs', 'markers']", policy)


def _is_possible(found: Merged | Reverted, policy: str) -> bool:
    is_anything = found.counts.total or found.conflicts or found.repositories
    return bool(is_anything) and (policy != "fail" or not found.conflicts)


def _conflicts(found: Merged | Reverted | Pair) -> list[str]:
    return problem_lines({path: f"{each.reason}: {each.detail}" for path, each in found.conflicts.items()})


def _repositories(found: Merged | Reverted | Applied) -> list[str]:
    lines = problem_lines({path: each.detail for path, each in found.repositories.items()})
    return [*lines, *(command for each in found.repositories.values() for command in each.commands)]


async def _merged(
    request: Request,
    source: WorkspaceSource,
    found: Merged | Reverted,
    other: str,
    what: str,
    notes: Sequence[str] = (),
) -> Response:
    if found.applied:
        return await changed(request, source, what, found, notes)
    title = f"Nothing was changed: {counted(len(found.conflicts), 'conflict')} with {other}."
    return done(request, source, title=title, notes=_conflicts(found))


async def confirm_adopt(request: Request) -> Response:
    """GET `/w/KEY/adopt`: show what it would change to make the workspace equal to a fork, and what would be lost."""
    source, fork = _pair(request, request.query_params)
    found = await source.run(source.requests.adopt(fork, force=True, dry_run=True))
    values = {"fork": fork, "hidden": {"fork": fork}, "conflicts": _conflicts(found), "force": "Replace these changes"}
    return confirm(request, "adopt.html", source, found, "adopt", **values)


async def adopt(request: Request) -> Response:
    """POST `/w/KEY/adopt`: make the workspace equal to a fork; with `force`, changes of its own are replaced."""
    form = await fields(request)
    source, fork = _pair(request, form)
    found = await complete(source, source.requests.adopt(fork, force=_force(form), touch=_touch(form)))
    return await _merged(request, source, found, fork, f"Adopted {fork}")


def _revert_call(
    source: WorkspaceSource, given: Mapping[str, str], *, dry_run: bool
) -> tuple[RemoteCall[Reverted], dict[str, str]]:
    """Build the request of a revert of a range, a call or a session; also return its form fields."""
    chosen = {name: given[name] for name in ("since", "until", "tool_call", "session") if given.get(name)}
    options: Any = {"paths": _paths(given), "conflicts": _policy(given), "dry_run": dry_run, "touch": _touch(given)}
    call = source.requests.revert(**cast("Any", chosen), **options)
    return call, {**chosen, "path": given.get("path", "")}


async def confirm_revert(request: Request) -> Response:
    """GET `/w/KEY/revert`: show what the revert of a range of states, a call or a session would change."""
    source, policy = workspace_of(request), _policy(request.query_params)
    call, hidden = _revert_call(source, request.query_params, dry_run=True)
    found = await source.run(call)
    return confirm(
        request,
        "merge.html",
        source,
        found,
        "revert",
        title=f"Revert {_reverted(found, hidden)}, and keep everything later?",
        label="Paths that were changed again since then",
        hidden={**hidden, "conflicts": policy},
        policies={**_POLICIES, "theirs": "take the older version"},
        conflicts=[*found.warnings, *_conflicts(found), *_repositories(found)],
        is_possible=_is_possible(found, policy),
    )


async def revert(request: Request) -> Response:
    """POST `/w/KEY/revert`: undo what a range of states, a call or a session changed."""
    form = await fields(request)
    source = workspace_of(request)
    call, hidden = _revert_call(source, form, dry_run=False)
    found = await complete(source, call)
    notes = [*found.warnings, *_conflicts(found), *_repositories(found)]
    return await _merged(request, source, found, found.reverted, f"Reverted {_reverted(found, hidden)}", notes)


def _reverted(found: Reverted, hidden: Mapping[str, str]) -> str:
    return f"{found.reverted} in {hidden['path']}" if hidden["path"] else found.reverted


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
    hidden, force = {"path": request.query_params.get("path", "")}, "Overwrite what other programs changed there"
    values = {"hidden": hidden, "directory": directory, "conflicts": conflicts, "force": force}
    return confirm(request, "overlay.html", source, found, kind, **values)


async def apply(request: Request) -> Response:
    """POST `/w/KEY/apply`: write the changes to the directory; with `force`, over changes that others made there."""
    form = await fields(request)
    source = workspace_of(request)
    call: RemoteCall[Applied] = source.requests.apply(_paths(form), force=_force(form), touch=_touch(form))
    found: Applied = await complete(source, call)
    problems = problem_lines({**found.conflicts, **found.problems})
    notes = [
        *([found.recovered] if found.recovered else []),
        *older_lines(found.older, "touch(1) what has to be built, or choose the present time when you apply"),
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
