"""Sizes, counts, changes and paths as people and models read them: on a terminal, on a web page, in answers of MCP.

Below them are the words of the commands that the fast path answers: lines without colours and without escapes.  Their
arguments are messages, or objects with the same attributes.

Start-up: this module imports nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final, Literal

    from protocol.types import ChangeCounts
    from vfsd.operations.snapshots import RestoreResult
    from vfsd.operations.workspace import StatusResult

    Cell = str | int | None
    Kind = Literal["text", "size", "count", "time", "minute", "path"]

LETTERS: Final = {"added": "A", "modified": "M", "removed": "D", "type": "T", "metadata": "m"}
# C0, DEL, C1, and what changes the direction of text (Unicode Standard Annex 9): a file name must not move the cursor,
# split a line of a script's input, or make another name or the rest of the line look like something else.
_CODES: Final = (*range(32), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES: Final = {code: "".join(f"\\x{byte:02x}" for byte in chr(code).encode()) for code in _CODES}


def show_path(path: str) -> str:
    """Escape the control characters of a wire path as `\\xNN`.  The result is a wire path of the same file."""
    return path.translate(_ESCAPES)


def with_slash(path: str, kind: str) -> str:
    """Return `path`; that of a directory with a slash at its end."""
    return path + ("/" if kind == "directory" else "")


def change_line(change: str, path: str) -> str:
    """Format a change: "A path"."""
    return f"{LETTERS[change]} {path}"


def count_words(counts: ChangeCounts) -> str:
    """Format counts: "2 added, 1 modified", or "no changes"."""
    parts = [("added", counts.added), ("modified", counts.modified), ("removed", counts.removed)]
    return ", ".join(f"{count:,} {word}" for word, count in parts if count) or "no changes"


def link_note(linked_to: str | None, unlinked_from: str | None) -> str:
    """Say after a path of which file it became a name, or else of which it is no longer a name; "" if neither."""
    if linked_to is not None:
        return f" (hard link to {show_path(linked_to)})"
    return "" if unlinked_from is None else f" (no longer a hard link to {show_path(unlinked_from)})"


def human_size(size_bytes: int) -> str:
    """Format a size: 512 B, 1.5 KiB, 20 MiB, ..."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):  # noqa: B007 the unit is used below
        size /= 1024
        if size < 1023.95:
            break
    return f"{size:.1f} {unit}" if size < 100 else f"{size:.0f} {unit}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Format a count: "1 file", "2 files", "1,000 files".  `plural` is for nouns with an irregular plural."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def older_note(older: int, advice: str) -> str:
    """Say how many files, one at least, an operation made older than what they replaced, and what to do then."""
    files, they = (f"{older:,} files are", "they") if older > 1 else ("1 file is", "it")
    return f"{files} older than what {they} replaced; build tools may not notice: {advice}"


# -- answers of commands ---------------------------------------------------------------------------
def signed_counts(counts: ChangeCounts | None) -> str | None:
    """Format counts in the width of a column: "+2 ~1 -0"."""
    return None if counts is None else f"+{counts.added} ~{counts.modified} -{counts.removed}"


def step_words(step: int | None) -> str | None:
    """Say how an undo or redo reaches a snapshot: "undo 2", "redo 1" or "here"."""
    if step is None:
        return None
    return f"{'undo' if step < 0 else 'redo'} {abs(step)}" if step else "here"


def nothing_to_restore(source: str) -> str:
    """Say that a restore changed nothing."""
    return f"nothing to restore: everything is as in {source}"


def older_lines(older: int, way_back: str | None = "undo") -> list[str]:
    """Say how many files are older than what they replaced, and what to do; nothing if there are none.

    `way_back`: the step after which the same command changes these files again; None: nothing leads back.
    """
    if not older:
        return []
    advice = f"`--touch`, after `vfsd restore --{way_back}`"
    if way_back is None:
        advice = f"touch {'them' if older > 1 else 'it'}, or pass `--touch` the next time"
    return [older_note(older, advice)]


def outcome_lines(what: str, counts: ChangeCounts, safety_snapshot: str | None, older: int = 0) -> list[str]:
    """Say what was changed, which snapshot has the state before, and how many files are older than before."""
    lines = [f"{what}: {count_words(counts)}", *older_lines(older)]
    if safety_snapshot is not None:
        lines.append(f"the state before is {safety_snapshot}; `vfsd restore --undo` brings it back")
    return lines


def step_lines(verb: str, step: str, answer: RestoreResult) -> list[str]:
    """Say what an undo or a redo did, and whether more steps can be undone or redone."""
    lines = [f"{verb} {step}: {count_words(answer.counts)}"]
    if step == "apply":
        lines.append("what was applied stays in the directory below")
    ways = [
        f"`vfsd restore --{way}` goes {direction}" + (f" ({steps:,} steps)" if steps > 1 else "")
        for way, steps, direction in (("undo", answer.undo_steps, "back"), ("redo", answer.redo_steps, "forward"))
        if steps
    ]
    lines.append("; ".join(filter(None, (f"the state left is {answer.safety_snapshot}", ", ".join(ways)))))
    return lines + older_lines(answer.older, "redo" if verb == "undid" else "undo")


def engine_words(status: StatusResult) -> str:
    """Name the engine, and why it is used."""
    return f"{status.engine} ({status.engine_reason})" if status.engine_reason else status.engine


def container_words(status: StatusResult) -> str:
    """Describe the container and its transport."""
    trouble = "" if status.connected else ": not connected; requests fail until the container runs again"
    return f"{status.container} ({status.transport} transport{trouble})"


def _if_any(heading: str, kind: Kind, cell: Cell) -> list[tuple[str, Kind, Cell]]:
    return [(heading, kind, cell)] if cell else []


_OVERLAY_COUNTS: Final = "what was read or changed so far; below the overlay there may be more"


_FREE: Final = "`vfsd persisted list` shows each, and how to remove it"


def status_rows(status: StatusResult) -> list[tuple[str, Kind, Cell]]:
    """Return heading, kind and value of each row of `vfsd status`."""
    return [
        ("name", "text", status.name),
        ("mountpoint", "path", status.mountpoint),
        ("backend", "text", status.backend),
        *_if_any("frozen", "text", "yes" if status.frozen else None),
        *_if_any("source", "text", status.source),
        *_if_any("fetched", "size", status.fetched_bytes),
        *_if_any("prefetch", "text", status.prefetch),
        *_if_any("fetch failure", "text", status.fetch_failure),
        *_if_any("cache failure", "text", status.cache_failure),
        *_if_any("inode failure", "text", status.inode_failure),
        ("engine", "text", engine_words(status)),
        *_if_any("wake-ups", "text", status.wakeups),
        ("cache", "text", status.cache),
        *_if_any("journal", "path", status.journal),
        *_if_any("fsync", "text", status.fsync),
        *_if_any("journal size", "size", status.journal_bytes),
        *_if_any("journal failure", "text", status.journal_failure),
        *_if_any("not compacted", "text", status.journal_uncompacted),
        *_if_any("all journals", "size", status.journals_bytes or None),
        *_if_any("snapshot store", "size", status.store_bytes or None),
        *_if_any("to free them", "text", _FREE if status.journals_bytes or status.store_bytes else None),
        ("read-only", "text", "yes" if status.read_only else "no"),
        ("files", "count", status.files),
        ("directories", "count", status.directories),
        ("size", "size", status.size_bytes),
        *_if_any("counted", "text", _OVERLAY_COUNTS if status.backend.startswith("overlay") else None),
        ("used", "size", status.used_bytes),
        ("max-bytes", "size", status.max_bytes),
        ("live", "size", status.live_bytes),
        ("snapshot-bytes", "size", status.snapshot_bytes),
        ("overhead", "size", status.overhead_bytes),
        ("max-memory", "size", status.max_memory),
        ("max-inodes", "count", status.max_inodes),
        ("snapshots", "count", status.snapshots),
        *_if_any("pruned", "count", status.pruned),
        ("requests", "count", status.requests),
        *_if_any("changed-below", "count", status.changed_below),
        *_if_any("commands", "text", status.commands),
        *_if_any("container", "text", container_words(status) if status.container else None),
        *_if_any("remote", "text", status.remote),
        *_if_any("interrupted", "text", status.interrupted),
        ("pid", "text", status.pid),
        ("started", "time", status.started_at),
        *_if_any("started by", "text", status.started_by),
        *_if_any("keeper", "text", status.keeper),
        *_if_any("fork of", "text", status.forked_from),
        *_if_any("base", "text", status.base),
        *_if_any("shared memory", "size", status.shared_memory),
        *_if_any("private memory", "size", status.private_memory),
        ("version", "text", status.version),
    ]
