"""`vfsd mount`: what it asks for, and what it refuses; the daemon that it would start is a fake one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from vfsd.cli.common.values import SIZE
from vfsd.cli.main import cli
from vfsd.wire.options import MountOptions

Started = list[MountOptions]


@pytest.fixture(autouse=True)
def current_directory(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workdir)


def mount(*args: str) -> Result:
    return CliRunner().invoke(cli, ["mount", *args])


def test_paths_become_absolute_and_the_name_comes_from_the_directory(started: Started, workdir: Path) -> None:
    result = mount("work", "--from", "old.zip")
    assert result.exit_code == 0
    assert result.stdout == f"workspace work is mounted at {workdir}/work (native engine)\n"
    assert "the one before was dead" in result.stderr
    assert started == [MountOptions.of(f"{workdir}/work", "work", archive=f"{workdir}/old.zip")]


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
        MountOptions.of(
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


def test_a_container_is_chosen_with_its_podman_its_directory_its_transport_and_its_network(started: Started) -> None:
    options = ["--podman-url", "ssh://me@there/sock", "--workdir", "/srv", "--transport", "agent", "--network", "web"]

    assert mount("/mnt", "--backend", "image:alpine", *options).exit_code == 0

    (given,) = started
    assert (str(given.workspace.backend), given.container.podman_url, given.container.workdir) == (
        "image:alpine",
        "ssh://me@there/sock",
        "/srv",
    )
    assert (given.container.transport, given.container.network) == ("agent", "web")


def test_a_sandbox_is_chosen_with_its_podman_its_network_and_its_limits(started: Started) -> None:
    options = ["--podman-url", "unix:///p.sock", "--network", "web", "--pids-limit", "64", "--memory", "1GiB"]

    assert mount("/mnt", "--sandbox", "image:alpine", "--snapshot-each", *options).exit_code == 0

    (given,) = started
    assert (str(given.workspace.backend), str(given.commands.sandbox), given.commands.snapshot_each) == (
        "memory",
        "image:alpine",
        True,
    )
    assert (given.container.podman_url, given.container.network, given.container.pids_limit) == (
        "unix:///p.sock",
        "web",
        64,
    )
    assert given.container.memory_bytes == 2**30


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--workdir", "/srv"], "--workdir goes with container:NAME, image:REF or exec:COMMAND"),
        (["--transport", "agent"], "--transport goes with container:NAME or image:REF"),
        (["--backend", "container:web", "--workdir", "srv"], "--workdir must be an absolute path"),
        (["--backend", "container:web", "--workdir", "/srv/../etc"], "--workdir must be an absolute path"),
        (["--backend", "container:web", "--podman-url", "podman.sock"], "not the address of a Podman service"),
        (["--backend", "container:web", "--network", "host"], "--network goes with image:REF or --sandbox"),
        (["--backend", "container:web", "--max-bytes", "1M"], "--max-bytes goes with memory or overlay:DIR"),
        (["--backend", "image:alpine", "--from", "a.zip"], "--from goes with memory or overlay:DIR"),
        (["--sandbox", "python:3.12"], "--sandbox must be image:REF"),
        (["--sandbox", "image:alpine", "--on-host"], "--sandbox and --on-host exclude each other"),
        (["--snapshot-each"], "--snapshot-each goes with container:NAME, image:REF, --sandbox or --on-host"),
        (["--memory", "1G"], "--memory goes with image:REF or --sandbox"),
        (["--pids-limit", "5"], "--pids-limit goes with image:REF or --sandbox"),
        (["--exclude", "x"], "--exclude goes with overlay:DIR"),
    ],
)
def test_options_that_make_no_sense_together_are_wrong_usage_in_the_words_of_the_command_line(
    started: Started, args: list[str], reason: str
) -> None:
    result = mount("/mnt", *args)

    assert (result.exit_code, result.stdout, started) == (2, "", [])
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


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
