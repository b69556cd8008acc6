"""`vfsd push` from each kind of snapshots, `vfsd pull`, and a mount of what was pulled; on a real S3 server."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import backend_over
from tests.support.s3_server import BUCKET, KEYS, s3_server
from vfsd.client.workspace import Workspace

pytestmark = pytest.mark.fuse


@pytest.fixture(scope="module")
def s3_environment() -> Iterator[dict[str, str]]:
    with s3_server() as port:
        yield {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true", **KEYS}


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vfsd.cli.main", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, **environment})


def answer(environment: dict[str, str], *words: str) -> dict[str, Any]:
    done = run(environment, *words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.extended
@pytest.mark.parametrize("backend", ["memory", "overlay", "host"])
def test_a_pushed_state_is_pulled_and_mounted(
    backend: str, s3_environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/{backend}"
    monkeypatch.setenv("VFSD_STORE_DIR", str(tmp_path / "store"))
    below = tmp_path / "below"
    below.mkdir()
    (below / "old").write_text("old")
    text = backend_over(backend, below)
    with Workspace.mount(tmp_path / "m", backend=text) as work:
        Path(work.path, "file").write_text("first")
        work.snapshot("one", tag="a tag")
        Path(work.path, "file").write_text("second")
        first = answer(s3_environment, "push", url, "--snapshot", "one", "-w", work.path)
        live = answer(s3_environment, "push", url, "--as", "live", "-w", work.path)
        assert [info.name for info in work.snapshots()] == ["one"]
    assert (first["name"], first["is_new"], live["name"]) == ("one", True, "live")
    (kept, *_) = answer(s3_environment, "store", "list", "--store", url)["snapshots"]
    assert (kept["name"], kept["tag"]) == ("one", "a tag")
    assert answer(s3_environment, "store", "check", "--store", url)["ok"]
    if backend != "host":
        assert answer(s3_environment, "store", "list")["snapshots"] == []  # nothing temporary is left

    monkeypatch.setenv("VFSD_STORE_DIR", str(tmp_path / "other"))
    assert answer(s3_environment, "pull", f"{url}#one")["is_new"]
    assert not answer(s3_environment, "pull", f"{url}#one")["is_new"]
    with Workspace.mount(tmp_path / "m", backend=f"overlay:snapshot:one@{url}") as work:
        assert Path(work.path, "file").read_text() == "first"
        assert Path(work.path, "old").exists() == (backend != "memory")


def test_a_push_without_what_a_policy_hides_has_inode_numbers_and_ctimes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/remote"
    monkeypatch.setenv("VFSD_STORE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    below = tmp_path / "below"
    (below / "directory").mkdir(parents=True)
    for name in ("directory/file", "linked", "secret.key", "link-of-secret"):
        (below / name).write_text(name)
    (below / "directory" / "other-name").hardlink_to(below / "linked")
    (below / "link-of-secret").unlink()
    (below / "link-of-secret").hardlink_to(below / "secret.key")
    os.symlink("linked", below / "symlink")
    with Workspace.mount(tmp_path / "m", backend=f"host:{below}", hide=("*.key",)) as work:
        os.stat(f"{work.path}/linked")  # further names of a hidden file are listed until the first look at such a file
        expected = numbers_and_ctimes(work.path)
        work.snapshot("one")
        for options in (("--snapshot", "one"), ("--as", "live")):
            answer({}, "push", url, *options, "-w", work.path)
    assert "directory/other-name" in expected
    assert not {"secret.key", "link-of-secret"} & expected.keys()
    monkeypatch.setenv("VFSD_STORE_DIR", str(tmp_path / "other"))
    for name in ("one", "live"):
        answer({}, "pull", f"{url}#{name}")
        with Workspace.mount(tmp_path / "m", backend=f"overlay:snapshot:{name}@{url}") as copy:
            assert numbers_and_ctimes(copy.path) == expected, "an index of git is not valid any more"


def numbers_and_ctimes(root: str) -> dict[str, tuple[int, int]]:
    """What git compares of each file, with its path."""
    found = {str(path.relative_to(root)): path.lstat() for path in Path(root).rglob("*")}
    return {name: (seen.st_ino, seen.st_ctime_ns) for name, seen in found.items()}


def test_a_name_with_odd_characters_is_escaped_and_the_command_can_be_pasted(
    s3_environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, name = f"s3://{BUCKET}/odd", "two words\x1b[31m"
    monkeypatch.setenv("VFSD_STORE_DIR", str(tmp_path / "store"))
    with Workspace.mount(tmp_path / "m") as work:
        pushed = run(s3_environment, "push", url, "--as", name, "-w", work.path)
    assert (pushed.returncode, pushed.stderr) == (0, "")
    assert pushed.stdout.startswith(r"pushed two words\x1b[31m to ")
    pulled = run(s3_environment, "pull", f"{url}#{name}")
    assert pulled.stdout.startswith(r"pulled two words\x1b[31m (")
    assert "--backend 'overlay:snapshot:two words" in pulled.stderr


@pytest.mark.parametrize("directory", [None, "elsewhere"])
def test_a_restore_of_a_pulled_snapshot_says_which_option_it_needs(
    directory: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/remote"
    monkeypatch.setenv("VFSD_STORE_DIR", str(tmp_path / "store"))
    given = [] if directory is None else ["--store", str(tmp_path / directory)]
    with Workspace.mount(tmp_path / "m") as work:
        Path(work.path, "file").write_text("pushed")
        run({}, "push", url, "--as", "turn-3", "-w", work.path)
    pulled = run({}, "pull", f"{url}#turn-3", *given)
    command = shlex.join(["vfsd", "restore", "turn-3", "--of", url, *given])
    assert f"`{command}` restores it" in pulled.stderr
    with Workspace.mount(tmp_path / "m") as work:
        refused = run({}, "restore", "turn-3", "-w", work.path)
        assert refused.returncode == 1
        assert (
            f"no such snapshot of this workspace: turn-3, but the store has one of {url}: `{command}`\n"
            in refused.stderr
        ) == (directory is None)
        restored = run({}, *shlex.split(command)[1:], "-w", work.path)
        assert restored.returncode == 0, restored.stderr
        assert Path(work.path, "file").read_text() == "pushed"


@pytest.mark.extended
def test_errors_are_one_line(s3_environment: dict[str, str], tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/errors"
    others = dict(s3_environment)
    cases = [
        (("pull", f"{url}#x"), "no snapshot store here"),
        (("pull", "s3://no-such-bucket/x"), "no such bucket"),
        (("pull", "relative/path"), "is not a URL"),
        (("pull", url, "--store-option", "region"), "write KEY=VALUE"),
        (("pull", url, "--store-option", "wrong=1"), "wrong"),
        (("push", url, "--store-option", "aws_secret_access_key=x"), "set AWS_SECRET_ACCESS_KEY"),
        (("pull", url, "--store-option", "azure_storage_account_key=x"), "set AZURE_STORAGE_ACCOUNT_KEY"),
        (("store", "list", "--store", url, "--store-option", "endpoint=http://me:x@host"), "credentials come from"),
        (("store", "list", "--store", "s3:///x"), "has no bucket"),
        (("store", "list", "--store", "file://relative"), "write file:///DIRECTORY"),
        (("store", "list", "--store", url, "--store-option", "path_style=ja"), "path_style=true or path_style=false"),
        (("store", "gc", "--store", url), "no snapshot store here"),
    ]
    for words, expected in cases:
        done = run(others, *words)
        assert done.returncode in {1, 2}
        assert expected in done.stderr
        assert done.stderr.count("\n") == 1
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        del others[name]
    done = run({**others, "AWS_EC2_METADATA_DISABLED": "true"}, "pull", url)
    assert "set AWS_ACCESS_KEY_ID" in done.stderr
