#!/usr/bin/env python3
"""Write the parts of docs/json.md that follow from `vfsd.operations`; with --check, exit with 1 if they are not there.

The keys of an answer are the fields of its struct, and their description is what stands in the source: the docstring of
the struct, and the comments of the fields.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from vfsd.operations import declaration, forks, snapshots, workspace
from vfsd.wire.options import Ready

DOCUMENT = Path(__file__).parents[1] / "docs" / "json.md"
ANSWERS: dict[str, type[msgspec.Struct]] = {
    "mount": Ready,
    "status": workspace.StatusResult,
    "snapshot": snapshots.SnapshotRecord,
    "snapshots": snapshots.SnapshotsResult,
    "drop": snapshots.DropResult,
    "restore": snapshots.RestoreResult,
    "diff": snapshots.DiffResult,
    "export": snapshots.ExportResult,
    "import": snapshots.ImportResult,
    "apply": snapshots.ApplyResult,
    "fork": forks.ForkResult,
    "merge": forks.MergeResult,
    "conflicts": forks.ConflictsResult,
    "revert": forks.RevertResult,
    "policy": workspace.PolicyResult,
    "compact": workspace.CompactResult,
}
LIKE = {"rewind": "restore", "discard": "restore", "adopt": "merge"}  # the same keys
LEFT_OUT = {"diff": {"omitted", "patch_bytes", "git_only"}}  # of a patch only
RECORDS = (
    declaration.ChangeRecord,
    snapshots.ProblemRecord,
    declaration.ExpiredRecord,
    forks.ConflictRecord,
    declaration.RepositoryRecord,
    forks.RangeRecord,
    forks.PairRecord,
    forks.BelowRecord,
)
NAMES = {each.__name__: f"[{each.__name__.removesuffix('Record').lower()}]" for each in RECORDS}
PYTHON = {"None": "null", "True": "true", "False": "false", "CHANGES_LISTED": f"{snapshots.CHANGES_LISTED:,}"}
PYTHON |= {"RestoreResult": "[restore](#restore-rewind-discard)", "ExportResult": "[export]"}
NAMES |= {"str": "text", "int": "number", "float": "number", "bool": "true or false", "None": "null"}
NAMES |= {
    "ChangeCounts": "counts",
    "SnapshotRecord": "[snapshot]",
    "DroppedStepRecord": "object with `name` and `step`",
}


def fields(struct: type[msgspec.Struct]) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the type and the comment of each field."""
    for each in [each for each in reversed(struct.__mro__) if each not in (object, *msgspec.Struct.__mro__)]:
        source = textwrap.dedent(inspect.getsource(each))
        lines = source.splitlines()
        for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                _, _, comment = lines[node.end_lineno - 1].partition("  # ")
                yield node.target.id, kind(node.annotation), comment


def kind(annotation: ast.expr) -> str:
    """Describe a type."""
    match annotation:
        case ast.BinOp(left=left, right=right):
            return f"{kind(left)} or {kind(right)}"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=values):
            return " or ".join(f'"{value}"' for value in ast.literal_eval(values))  # more than one
        case ast.Subscript(value=ast.Name(id="dict")):
            return "object"
        case ast.Subscript(slice=ast.Tuple(elts=[item, *_])) | ast.Subscript(slice=item):
            return f"list of {kind(item)}"
    name = ast.unparse(annotation)
    return NAMES.get(name, name if name != "CacheChoice" else '"writethrough" or "writeback"')


def documented(title: str, struct: type[Any], left_out: set[str]) -> Iterator[str]:
    """Yield the section of a struct."""
    yield f"### {title}\n"
    text = re.sub(r"^Result of `[^`]*`(?: and of `[^`]*`)?[.:] *", "", inspect.cleandoc(struct.__doc__ or ""))
    paragraphs = [" ".join(each.split()) for each in text.split("\n\n") if each.strip()]
    yield from (textwrap.fill(each[0].upper() + each[1:], 130) + "\n" for each in paragraphs)
    yield (
        "\n".join(
            f"- `{name}`: {words}" + (f"; {comment}" if comment else "")
            for name, words, comment in fields(struct)
            if name not in left_out
        )
        + "\n"
    )


def generated() -> str:
    """Return the generated part of the document."""
    rows = ["| command | keys of the answer |", "| --- | --- |"]
    for command, struct in {**ANSWERS, **{same: ANSWERS[other] for same, other in LIKE.items()}}.items():
        left_out = LEFT_OUT.get(command, set())
        keys = ", ".join(f"`{name}`" for name in struct.__struct_fields__ if name not in left_out)
        rows.append(f"| `{command}` | {keys} |")
    parts = ["\n".join(rows) + "\n"]
    for command, struct in ANSWERS.items():
        same = [other for other, of in LIKE.items() if of == command]
        parts += documented(", ".join(f"`{each}`" for each in (command, *same)), struct, LEFT_OUT.get(command, set()))
    for record in RECORDS:
        parts += documented(NAMES[record.__name__].strip("[]").capitalize(), record, set())
    text = "\n".join(parts)
    for python, here in PYTHON.items():
        text = re.sub(rf"\b{python}\b", here, text)
    return re.sub(r"\[(\w+)\](?!\()", r"[\1](#\1)", text)


def main() -> None:
    """Update the document, or check it."""
    text = DOCUMENT.read_text()
    start, end = "<!-- by scripts/json_doc.py -->\n", "<!-- by hand -->\n"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    wanted = f"{before}{start}{generated()}{end}{after}"
    if "--check" in sys.argv:
        sys.exit(0 if text == wanted else "docs/json.md is not what vfsd/operations says: run scripts/json_doc.py")
    DOCUMENT.write_text(wanted)


if __name__ == "__main__":
    main()
