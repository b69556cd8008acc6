"""dump_session_tree: a session, its children and the files of its workspace on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from weakincentives.runtime import Session

from protocol.linux.regular_file import write_atomically
from vfsd.client.arguments import FilePath
from vfsd.integrations.weakincentives.section import VfsdWorkspaceSection


def dump_session_tree(
    session: Session, target: FilePath, *, filesystem_section: VfsdWorkspaceSection | None = None
) -> Path | None:
    """Write `<session id>.jsonl`, and with a section `<session id>.fs.zip`, to a directory, and return the first path.

    `target` is that directory, or a file in it, whose own name does not count.  The JSONL file has a line for each
    session that has any state: `session` first, then its children.  `Snapshot.from_json` reads a line, and
    `FilesystemSnapshotManager.restore` the archive.  Both files replace those of an earlier dump of the same session,
    each in one step.  None if no session has any state; the archive is written nevertheless.

    The archive is written first, so that the session's state names it (`FilesystemSnapshotRef`).  Errors: those of
    `VfsdWorkspaceSection.export_snapshot`; OSError.
    """
    place = Path(target).expanduser().absolute()
    directory = place if place.is_dir() or not place.suffix else place.parent
    directory.mkdir(parents=True, exist_ok=True)
    name = str(session.session_id)
    if filesystem_section is not None:
        filesystem_section.export_snapshot(directory / f"{name}.fs.zip", overwrite=True)
    states = [each.snapshot(include_all=True) for each in _top_down(session, set())]
    lines = [state.to_json() for state in states if state.slices]
    if not lines:
        return None
    path = directory / f"{name}.jsonl"
    write_atomically(str(path), ("\n".join(lines) + "\n").encode(), durable=True)
    return path


def _top_down(session: Session, seen: set[Session]) -> Iterator[Session]:
    if session not in seen:
        seen.add(session)
        yield session
        for child in session.children:
            yield from _top_down(child, seen)
