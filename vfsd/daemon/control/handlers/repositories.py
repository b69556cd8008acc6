"""Git repositories that both sides of a merge or an apply have changed: fetch the branches, and say what was done.

Worker threads.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Final

from protocol.errors import shown
from vfsd.operations.declaration import RepositoryRecord
from vfsd.wire.messages import wire_path

_REFS_SHOWN: Final = 5


def planned_repositories(repositories: Sequence[bytes], other: str) -> list[RepositoryRecord]:
    """Return the records of a dry run, and of a merge whose conflicts prevent it."""
    detail = f"changed on both sides, so it is kept as it is, and gets the branches of {other}"
    return [RepositoryRecord(wire_path(path), detail) for path in repositories]


def fetched_repositories(
    repositories: Sequence[bytes], source: str, target: str, other: str, marked: Collection[bytes] = ()
) -> tuple[list[RepositoryRecord], bool]:
    """Fetch the branches of the workspace `other`, mounted at `source`, into the repositories below `target`.

    `marked`: files that the merge wrote conflict markers into.  Also returns whether no repository had a problem.
    """
    from protocol.merge.git import Fetched, fetch_repository  # noqa: PLC0415 (few merges need git)

    records, is_complete = [], True
    for path in repositories:
        fetched = Fetched(path, problem=f"{other} has ended")
        if source:
            fetched = fetch_repository(path, source, target, other, marked)
        left = ", ".join(shown(os.fsencode(ref)) for ref in fetched.left[:_REFS_SHOWN])
        if len(fetched.left) > _REFS_SHOWN:
            left += f" and {len(fetched.left) - _REFS_SHOWN:,} more"
        problem = fetched.problem or (f"git cannot read {left} there" if left and not fetched.refs else "")
        is_complete = is_complete and not problem
        detail = "changed on both sides, so it was kept as it is; "
        if problem:
            detail += f"the branches of {other} could not be fetched: {problem}"
        elif fetched.nothing:
            detail += f"no branches were fetched, because {other} has {fetched.nothing} there"
        else:
            without = f", without {left}, which git cannot read there" if left else ""
            once = " once the conflicts are resolved" if marked else ""
            take = f", and these commands take over its commits{once}:" if fetched.commands else ""
            detail += f"the branches of {other} are {fetched.refs}/* in it{without}{take}"
        records.append(RepositoryRecord(wire_path(path), detail, fetched.refs, list(fetched.commands)))
    return records, is_complete
