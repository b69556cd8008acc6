"""Listed: what a restore or an import changed, counted in full and listed up to a bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from protocol.diff.tree_diff import Change, DiffCounts
from vfsd.wire.messages import CHANGES_LISTED

__all__ = ["NOTHING", "Listed", "listed"]


_NONE: Final = DiffCounts()


@dataclass(frozen=True, slots=True)
class Listed:
    """`counts` is of all changes, `changes` has the first CHANGES_LISTED; `truncated` says that there are more."""

    counts: DiffCounts = _NONE
    changes: Sequence[Change] = ()
    truncated: bool = False

    def __bool__(self) -> bool:
        """Whether anything changed."""
        return bool(self.changes) or self.truncated


NOTHING: Final = Listed()


def listed(changed: Iterable[Change]) -> Listed:
    """Count and list `changed`; memory is bounded whatever there is."""
    added = modified = removed = 0
    first: list[Change] = []
    for change in changed:
        added += change.kind == "added"
        removed += change.kind == "removed"
        modified += change.kind not in {"added", "removed"}
        if len(first) < CHANGES_LISTED:
            first.append(change)
    return Listed(DiffCounts(added, modified, removed), first, added + modified + removed > len(first))
