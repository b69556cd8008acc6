"""`vfsd mount`: what it asks for, and what it refuses; the daemon that it would start is a fake one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from vfsd.cli.main import cli
from vfsd.cli.values import SIZE
from vfsd.options import MountOptions
from vfsd.ready import Ready

Started = list[MountOptions]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, workdir: Path) -> Started:
    """The options of what was started, in the background (the mount answers) or in the foreground."""
    options: Started = []

    def answer(asked: MountOptions) -> Ready:
        options.append(asked)
        return Ready(asked.name, asked.mountpoint, "/run/x.sock", 42, "native", recovered="the one before was dead")

    def foreground(asked: MountOptions, *, ready: Callable[[Ready], None]) -> None:
        ready(answer(asked))

    monkeypatch.setattr("vfsd.launch.launch", answer)
    monkeypatch.setattr("vfsd.launch.foreground", foreground)
    monkeypatch.chdir(workdir)
    return options


def mount(*args: str) -> Result:
    return CliRunner().invoke(cli, ["mount", *args])


def test_paths_become_absolute_and_the_name_comes_from_the_directory(started: Started, workdir: Path) -> None:
    result = mount("work", "--from", "old.zip")
    assert result.exit_code == 0
    assert result.stdout == f"workspace work is mounted at {workdir}/work (native engine)\n"
    assert "the one before was dead" in result.stderr
    assert started == [MountOptions(f"{workdir}/work", "work", archive=f"{workdir}/old.zip")]


@pytest.mark.parametrize(("words", "reason"), [(("",), "empty string"), (("/mnt", "-w", "n"), "--name")])
def test_what_would_mount_elsewhere_than_was_meant_is_wrong_usage(
    started: Started, words: tuple[str, ...], reason: str
) -> None:
    result = mount(*words)
    assert (result.exit_code, started) == (2, [])
    assert reason in result.stderr


def test_every_option_reaches_the_daemon(started: Started) -> None:
    limits = ("--max-bytes", "512M", "--max-inodes", "1000")
    flags = ("--read-only", "--allow-other", "--log-format", "json", "--log-level", "debug")
    assert mount("/mnt", "--name", "n", "--engine", "pyfuse3", *limits, *flags).exit_code == 0
    assert started == [
        MountOptions(
            "/mnt",
            "n",
            engine="pyfuse3",
            max_bytes=512 * 2**20,
            max_inodes=1000,
            read_only=True,
            allow_other=True,
            log_level="debug",
            log_format="json",
        )
    ]


def test_json_tells_where_the_workspace_is(started: Started) -> None:
    for stay in ([], ["--foreground"]):
        answer = json.loads(mount(os.fsdecode(b"/mnt/caf\xe9"), "--json", *stay).stdout)
        assert answer["mountpoint"] == "/mnt/caf\\xe9"
        assert answer["pid"] == 42


@pytest.mark.parametrize("backend", ["container:web", "image:alpine"])
def test_a_backend_to_come_is_an_error_that_says_so(started: Started, backend: str) -> None:
    result = mount("/mnt", "--backend", backend)
    assert result.exit_code == 1
    kind = backend.partition(":")[0]
    assert result.stderr == f"vfsd: error: the {kind} backend is not available in this version\n"
    assert started == []


@pytest.mark.parametrize(
    "args",
    [
        ["--backend", "tape"],
        ["--backend", "host:"],
        ["--name", "../x"],
        ["--max-bytes", "much"],
        ["--cache-timeout", "-1"],
        ["--max-bytes", "0"],
        ["--max-inodes", "0"],
        ["--engine", "steam"],
    ],
)
def test_what_makes_no_sense_is_a_usage_error(started: Started, args: list[str]) -> None:
    assert mount("/mnt", *args).exit_code == 2
    assert started == []


def test_a_mountpoint_that_is_missing_is_an_error_with_a_hint(workdir: Path) -> None:
    result = mount(str(workdir / "missing"))
    assert result.exit_code == 1
    assert result.stderr.startswith("vfsd: error: the mountpoint does not exist; make it with mkdir")
    assert not (workdir / "missing").exists()


def test_sizes_are_read_as_dd_reads_them() -> None:
    sizes = {
        "1": 1,
        "512": 512,
        "4k": 4096,
        "4KiB": 4096,
        "4kB": 4000,
        "1.5GiB": 3 * 2**29,
        "2 T": 2**41,
        "500MB": 500_000_000,
        "10B": 10,
    }
    assert {text: SIZE.convert(text, None, None) for text in sizes} == sizes
    for text in ("", "-1", "1X", "1iB1", "9E", "8388608T", "nan"):
        with pytest.raises(click.BadParameter):
            SIZE.convert(text, None, None)
