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


def test_each_command_answers_with_the_documented_keys(workspace: Workspace, root: Path, workdir: Path) -> None:
    def answer(*words: str) -> Any:
        return json.loads(succeeded(vfsd("-w", workspace.name, "--json", *words)))

    (root / "file").write_text("one\n")
    second, archive, remote = workdir / "second", str(workdir / "a.zip"), f"file://{workdir}/remote"
    second.mkdir()
    answers = {"snapshot": answer("snapshot", "s")}
    (root / "file").write_text("two\n")
    for command, *rest in (
        ("list",),
        ("status",),
        ("snapshots",),
        ("timeline",),
        ("diff",),
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
        answers[command] = answer(*command.split(), *rest)
    answer("snapshot", "--tag", "claude:prompt session=s: a prompt")
    answers["rewind"], answers["rewind --list"] = answer("rewind"), answer("rewind", "--list")
    answers["run"] = json.loads(succeeded(vfsd("run", "--json", "--", "true", cwd=second)))
    answers["doctor"] = json.loads(succeeded(vfsd("doctor", "--json")))
    answers["mount"] = json.loads(succeeded(vfsd("mount", "--json", "--on-host", str(second))))
    answers["exec"] = json.loads(succeeded(vfsd("exec", "--json", "-w", str(second), "--", "true")))
    below, overlay = workdir / "below", workdir / "overlay"
    below.mkdir()
    overlay.mkdir()
    succeeded(vfsd("mount", "--backend", f"overlay:{below}", str(overlay)))
    for command in ("discard", "apply"):
        answers[command] = json.loads(succeeded(vfsd(command, "--json", "-w", str(overlay))))
    succeeded(vfsd("unmount", str(overlay)))
    source, fork, forks = workdir / "source", workdir / "fork", workdir / "forks"
    source.mkdir()
    succeeded(vfsd("mount", str(source)))  # on the native engine
    answers["fork"] = json.loads(succeeded(vfsd("fork", "--json", "-w", str(source), str(fork))))
    answers["fork --count"] = json.loads(
        succeeded(vfsd("fork", "--json", "-w", str(source), str(forks), "--count", "1"))
    )
    for command in ("merge", "adopt"):
        answers[command] = json.loads(succeeded(vfsd(command, "--json", "-w", str(source), str(fork))))
    for place in (forks / "1", fork, source):
        succeeded(vfsd("unmount", "--discard", str(place)))
    answers["unmount"] = json.loads(succeeded(vfsd("unmount", "--json", "--discard", str(second))))
    journal = str(workdir / "journal")
    succeeded(vfsd("mount", str(source), "--persist", "--journal-dir", journal))
    answers["compact"] = json.loads(succeeded(vfsd("compact", "--json", "-w", str(source))))
    answers["upgrade"] = json.loads(succeeded(vfsd("upgrade", "--json", str(source))))
    succeeded(vfsd("unmount", str(source)))
    answers["persisted list"] = json.loads(succeeded(vfsd("persisted", "list", "--json")))
    for command in ("check", "drop"):
        words = ("persisted", command, "--json", "--journal-dir", journal)
        answers[f"persisted {command}"] = json.loads(succeeded(vfsd(*words)))
    key = f"host:{workdir / 'kept'}"
    (workdir / "kept").mkdir()
    Store(workdir / "store").take(key, "s", DirectorySource(workdir / "kept"))
    words = ("prune", "--json", "--store", str(workdir / "store"), "--keep-last", "1")
    answers["prune"] = json.loads(succeeded(vfsd(*words)))
    for command, *rest in (("list",), ("check",), ("gc",), ("drop", key, "s")):
        words = ("store", command, "--json", "--store", str(workdir / "store"), *rest)
        answers[f"store {command}"] = json.loads(succeeded(vfsd(*words)))
    assert {command: set(found) for command, found in answers.items()} == documented()
