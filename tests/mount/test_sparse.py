"""A sparse file that nobody could read through: commands take as long as its data, and keep its holes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import forking, mounted
from tests.mount.programs import succeeded, vfsd
from vfsd.client.workspace import Workspace

TEBIBYTE = 1 << 40
DATA = {7: b"first", TEBIBYTE // 2: b"middle", TEBIBYTE - 4: b"last"}


def write(path: Path, data: dict[int, bytes]) -> None:
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(TEBIBYTE)
        for offset, piece in data.items():
            os.pwrite(file.fileno(), piece, offset)


def assert_sparse(path: Path, data: dict[int, bytes], *, is_remote: bool = False) -> None:
    seen = path.stat()
    assert seen.st_size == TEBIBYTE
    if not is_remote:  # where the holes are is known once the file is read
        assert seen.st_blocks * 512 <= 16 << 20  # some chunks of 4 MiB, of which a store keeps the digests
    with path.open("rb") as file:
        for offset, piece in data.items():
            assert os.pread(file.fileno(), len(piece), offset) == piece


@pytest.fixture(params=["memory", "overlay", "host"])
def workspace(request: pytest.FixtureRequest, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    """With the file: in memory, written above another one, or in the directory."""
    monkeypatch.setenv("VFSD_STORE_DIR", str(workdir / "store"))
    below = workdir / "below"
    below.mkdir()
    if request.param != "memory":
        write(below / "big", DATA)
    with mounted(workdir / "m", backend=request.param, engine="native", name="sparse") as workspace:
        write(Path(workspace.path) / "big", DATA)
        yield workspace


def test_snapshots_forks_and_merges_keep_the_holes(workspace: Workspace, workdir: Path) -> None:
    big = Path(workspace.path) / "big"
    workspace.snapshot("s1")
    with forking(workdir, workspace) as fork:
        made = fork("sparse-fork")
        copy = Path(made.path) / "big"
        assert_sparse(copy, DATA)
        write(copy, {TEBIBYTE // 3: b"more"})
        assert [change.path for change in workspace.diff(against=made).changes] == ["big"]
        workspace.merge(made)
    assert_sparse(big, {**DATA, TEBIBYTE // 3: b"more"})
    workspace.restore("s1")
    assert_sparse(big, {**DATA, TEBIBYTE // 3: bytes(4)})


def test_a_push_and_a_pull_keep_the_holes(workspace: Workspace, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace.snapshot("s1")
    url = f"file://{workdir}/remote"
    succeeded(vfsd("push", url, "-w", workspace.name, "--snapshot", "s1"))
    monkeypatch.setenv("VFSD_STORE_DIR", str(workdir / "other"))
    succeeded(vfsd("pull", f"{url}#s1"))
    for source in (f"{url}#s1", f"snapshot:s1@{url}"):  # fetched when it is read, and pulled
        with mounted(workdir / "resumed", backend=f"overlay:{source}", engine="native", name="s2") as resumed:
            assert_sparse(Path(resumed.path) / "big", DATA, is_remote=source.startswith(url))


def test_copy_file_range_copies_holes_as_holes(workspace: Workspace) -> None:
    big, copy = Path(workspace.path) / "big", Path(workspace.path) / "copy"
    length = 512 << 20
    copy.write_bytes(b"x" * 8192)
    with big.open("rb") as source, copy.open("r+b") as target:
        done = 0
        while done < length:
            done += os.copy_file_range(source.fileno(), target.fileno(), length - done, done, done)
        assert os.pread(target.fileno(), 20, 0) == bytes(7) + b"first" + bytes(8)
        assert os.pread(target.fileno(), 4096, 4096) == bytes(4096)
    assert copy.stat().st_size == length
    assert copy.stat().st_blocks * 512 < 1 << 20
