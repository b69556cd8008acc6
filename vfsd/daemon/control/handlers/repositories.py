"""Git repositories that both sides of a merge or an apply have changed: fetch the branches, and say what was done.

Worker threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from vfsd.wire.base import RepositoryRecord
from vfsd.wire.messages import wire_path


def planned_repositories(repositories: Sequence[bytes], other: str) -> list[RepositoryRecord]:
    """Return the records of a dry run, and of a merge whose conflicts prevent it."""
    detail = f"changed on both sides, so it is kept as it is, and gets the branches of {other}"
    return [RepositoryRecord(wire_path(path), detail) for path in repositories]


def fetched_repositories(repositories: Sequence[bytes], source: str, target: str, other: str) -> list[RepositoryRecord]:
    """Fetch the branches of the workspace `other`, mounted at `source`, into the repositories below `target`."""
    from protocol.merge.git import Fetched, fetch_repository  # noqa: PLC0415 (few merges need git)

    records = []
    for path in repositories:
        fetched = Fetched(path, problem=f"{other} has ended")
        if source:
            fetched = fetch_repository(path, source, target, other)
        kept = "changed on both sides, so it was kept as it is"
        if fetched.problem:
            detail = f"{kept}; the branches of {other} could not be fetched: {fetched.problem}"
        else:
            take = ", and these commands take over its commits:" if fetched.commands else ""
            detail = f"{kept}; the branches of {other} are {fetched.refs}/* in it{take}"
        records.append(RepositoryRecord(wire_path(path), detail, fetched.refs, list(fetched.commands)))
    return records
