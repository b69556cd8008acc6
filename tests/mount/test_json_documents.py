"""docs/json.md: each command answers with the keys that stand there, and with no others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protocol.store import DirectorySource, Store
from tests.mount.programs import succeeded, vfsd
from vfsd.client.workspace import Workspace

pytestmark = pytest.mark.fuse

REPOSITORY = Path(__file__).parents[2]
_ROW = re.compile(r"^\| `([a-z -]+)` \| (`.+`) \|$", re.MULTILINE)


def documented() -> dict[str, set[str]]:
    text = (REPOSITORY / "docs" / "json.md").read_text()
    return {command: set(re.findall(r"`(\w+)`", keys)) for command, keys in _ROW.findall(text)}


def test_the_document_has_what_the_operations_declare() -> None:
    subprocess.run([sys.executable, REPOSITORY / "scripts" / "json_doc.py", "--check"], check=True)


def answer(*words: object) -> Any:
    return json.loads(succeeded(vfsd(*words)))


def test_each_command_answers_with_the_documented_keys(workspace: Workspace, root: Path, workdir: Path) -> None:
    answers = {
        **of_a_workspace(workspace.name, root, workdir),
        **of_starts(workdir),
        **of_forks(workdir),
        **of_journals(workdir),
        **of_a_store(workdir),
        "doctor": answer("doctor", "--json"),
    }
    assert {command: set(found) for command, found in answers.items()} == documented()


def of_a_workspace(name: str, root: Path, workdir: Path) -> dict[str, Any]:
    def told(*words: str) -> Any:
        return answer("-w", name, "--json", *words)

    (root / "file").write_text("one\n")
    archive, remote = str(workdir / "a.zip"), f"file://{workdir}/remote"
    answers = {"snapshot": told("snapshot", "s")}
    (root / "file").write_text("two\n")
    for command, *rest in (
        ("list",),
        ("status",),
        ("snapshots",),
        ("timeline",),
        ("diff",),
        ("diff --summary",),
        ("diff --patch",),
        ("log",),
        ("policy",),
        ("export", archive),
        ("push", remote, "--snapshot", "s"),
        ("pull", f"{remote}#s", "--store", str(workdir / "pulled")),
        ("restore", "s"),
        ("import", archive),
        ("drop", "s"),
        ("completion", "bash"),
        ("hooks",),
        ("hooks install", "claude", "--dry-run"),
        ("hooks remove", "claude", "--dry-run"),
        ("hooks status", "claude"),
    ):
        answers[command] = told(*command.split(), *rest)
    told("snapshot", "--tag", "claude:prompt session=s: a prompt")
    answers["rewind"], answers["rewind --list"] = told("rewind"), told("rewind", "--list")
    return answers


def of_starts(workdir: Path) -> dict[str, Any]:
    second, below, overlay = (workdir / name for name in ("second", "below", "overlay"))
    for directory in (second, below, overlay):
        directory.mkdir()
    answers = {
        "run": json.loads(succeeded(vfsd("run", "--json", "--", "true", cwd=second))),
        "mount": answer("mount", "--json", "--on-host", second),
        "exec": answer("exec", "--json", "-w", second, "--", "true"),
        "unmount": answer("unmount", "--json", "--discard", second),
    }
    succeeded(vfsd("mount", "--backend", f"overlay:{below}", overlay))
    answers |= {command: answer(command, "--json", "-w", overlay) for command in ("discard", "apply")}
    succeeded(vfsd("unmount", overlay))
    return answers


def of_forks(workdir: Path) -> dict[str, Any]:
    source, fork, forks = (workdir / name for name in ("source", "fork", "forks"))
    source.mkdir()
    succeeded(vfsd("mount", source))  # on the native engine
    succeeded(vfsd("snapshot", "-w", source, "a"))
    (source / "file").touch()
    succeeded(vfsd("snapshot", "-w", source, "b"))
    answers = {
        "revert": answer("revert", "--json", "-w", source, "a..b"),
        "fork": answer("fork", "--json", "-w", source, fork),
        "fork --count": answer("fork", "--json", "-w", source, forks, "--count", "1"),
        "conflicts": answer("conflicts", "--json", "-w", source),
        "merge": answer("merge", "--json", "-w", source, fork),
        "adopt": answer("adopt", "--json", "-w", source, fork),
    }
    for place in (forks / "1", fork, source):
        succeeded(vfsd("unmount", "--discard", place))
    return answers


def of_journals(workdir: Path) -> dict[str, Any]:
    kept, journal = workdir / "kept", workdir / "journal"
    kept.mkdir()
    succeeded(vfsd("mount", kept, "--persist", "--journal-dir", journal))
    answers = {
        "compact": answer("compact", "--json", "-w", kept),
        "upgrade": answer("upgrade", "--json", kept),
    }
    succeeded(vfsd("unmount", kept))
    answers["persisted list"] = answer("persisted", "list", "--json")
    for command in ("check", "drop"):
        answers[f"persisted {command}"] = answer("persisted", command, "--json", "--journal-dir", journal)
    return answers


def of_a_store(workdir: Path) -> dict[str, Any]:
    place, store = workdir / "place", workdir / "store"
    place.mkdir()
    key = f"host:{place}"
    Store(store).take(key, "s", DirectorySource(place))
    answers = {"prune": answer("prune", "--json", "--store", store, "--keep-last", "1")}
    for command, *rest in (("list",), ("check",), ("gc",), ("drop", key, "s")):
        answers[f"store {command}"] = answer("store", command, "--json", "--store", store, *rest)
    return answers
