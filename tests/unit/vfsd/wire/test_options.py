"""Every option of `vfsd mount` with every backend and every other option: started, or refused in one line.

The daemon that would start is a fake one, so that thousands of combinations take seconds.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import click
import pytest
from click.testing import CliRunner, Result

from tests.support.toy_backend import install_backend
from vfsd.cli.main import cli
from vfsd.cli.mount import mount_command
from vfsd.client.arguments import FilePath, MountArguments, mount_options
from vfsd.wire.option_rules import OptionError, is_secret
from vfsd.wire.options import BACKENDS, BackendSpec, MountOptions, declared_options, known_backends, parse_backend

REPOSITORY = Path(__file__).parents[4]

# Of each option a value that is good by itself, and values that are not, or that are at a limit.
VALUES: dict[str, list[str]] = {
    "--name": ["good", "", "../x", "a\nb", "x" * 65, "caf\udce9"],
    "--engine": ["native", "pyfuse3", "", "steam"],
    "--from": ["a.zip", "", "\udcff"],
    "--max-bytes": ["64MiB", "", "0", "-1", "9" * 40, "nan", "\udcff"],
    "--max-inodes": ["100", "", "0", "-1", "9" * 40, "1.5"],
    "--wakeups": ["off", "auto", "on", "", "maybe"],
    "--journal-dir": ["kept", "", "/proc/nothing"],
    "--fsync": ["always", "everysec", "no", "", "sometimes"],
    "--cache-timeout": ["2", "0", "", "-1", "nan", "inf", "1e308"],
    "--cache": ["writeback", "writethrough", "", "later"],
    "--snapshot-dir": ["hidden", "visible", "off", "", "on"],
    "--store": ["kept", "", "/proc/nothing"],
    "--store-option": ["region=eu-west-1", "", "region", "=x", "aws_secret_access_key=x"],
    "--cache-bytes": ["64MiB", "0", "", "1KiB", "-1", "nan"],
    "--remote-timeout": ["2", "0", "", "-1", "nan", "inf"],
    "--include": ["*.py", "", "\udcff", "!"],
    "--exclude": [".env", "", "[", "\\"],
    "--protect": ["*.lock", "", "!", "#x"],
    "--hide": [".env", "", "[", "\udcff"],
    "--sandbox": ["image:python:3.12", "", "image:", "python:3.12", "container:x"],
    "--pids-limit": ["64", "", "0", "-1", "9" * 40],
    "--memory": ["1GiB", "", "0", "much"],
    "--podman-url": ["unix:///p.sock", "ssh://me@there/p.sock", "", "p.sock", "http://x", "tcp://[::1", "unix://"],
    "--workdir": ["/srv", "", "srv", "/srv/../etc", "/\udcff"],
    "--transport": ["agent", "rootfs", "", "pigeon"],
    "--network": ["web", ""],
    "--audit": ["log.jsonl", ""],
    "--log-level": ["debug", "", "loud"],
    "--log-format": ["json", "", "xml"],
    "--max-memory": ["64MiB", "", "0", "-1"],
}
WRONG_BACKENDS = [
    "",
    "tape",
    "host:",
    "overlay:",
    "overlay:s3://",
    "container:",
    "image:",
    "exec:",
    "exec:'",
    ":",
    "memory:",
    "host:missing",
    "host:file",
]


def options_of_mount() -> list[click.Option]:
    """The options of `vfsd mount` itself, without those that every command has."""
    shared = {"help_all", "workspace", "as_json", "backend", "help"}
    return [param for param in mount_command.params if isinstance(param, click.Option) and param.name not in shared]


def words_of(option: click.Option) -> list[list[str]]:
    """Every way to give the option; the first is good by itself."""
    flag = option.opts[-1]
    return [[flag]] if option.is_flag else [[flag, value] for value in VALUES[flag]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with what the combinations name; the current one."""
    place = tmp_path_factory.mktemp("options")
    for name in ("below", "mnt"):
        (place / name).mkdir()
    (place / "file").touch()
    before = os.getcwd()
    os.chdir(place)
    yield place
    os.chdir(before)


def check(result: Result, words: list[str], started: list[MountOptions]) -> None:
    """Started, failed or refused, each with what it has to print; never an exception of another kind."""
    assert isinstance(result.exception, SystemExit | None), (words, result.exception)
    assert result.exit_code in {0, 1, 2}, words
    assert bool(started) == (result.exit_code == 0), words
    document = json.loads(result.stdout)  # one
    if result.exit_code == 0:
        assert result.stderr == "", words
    else:
        assert result.stderr.startswith("vfsd: error: "), words
        assert result.stderr.count("\n") == 1, words
        assert not re.search(r"\b(max_bytes|memory_bytes|pids_limit|cache_timeout_s|archive is)\b", result.stderr), (
            words
        )
        assert document["error"]["message"], words
    started.clear()


def mount(*words: str) -> Result:
    return CliRunner().invoke(cli, ["mount", "mnt", "--json", *words])


BACKEND_WORDS = {
    "memory": "memory",
    "overlay": "overlay:below",
    "host": "host:below",
    "container": "container:web",
    "image": "image:docker.io/library/alpine:3.20",
    "exec": "exec:ssh build python3",
}


@pytest.mark.extended
@pytest.mark.parametrize("backend", [*BACKEND_WORDS.values(), *WRONG_BACKENDS])
def test_one_option_with_one_backend_starts_or_is_refused_in_one_line(
    backend: str, place: Path, started: list[MountOptions]
) -> None:
    for words in [[], *(words for option in options_of_mount() for words in words_of(option))]:
        check(mount("--backend", backend, *words), words, started)


@pytest.mark.extended
@pytest.mark.parametrize("backend", BACKEND_WORDS.values())
def test_two_options_with_one_backend_start_or_are_refused_in_one_line(
    backend: str, place: Path, started: list[MountOptions]
) -> None:
    for first, second in itertools.combinations(options_of_mount(), 2):
        # A value that is wrong by itself is refused with any other option: one of the two is good.
        words = [*words_of(first)[0], *words_of(second)[0]]
        check(mount("--backend", backend, *words), words, started)


@pytest.mark.extended
@pytest.mark.parametrize("kind", BACKENDS)
def test_an_option_starts_with_the_backends_of_the_table_and_with_no_other(
    kind: str, place: Path, started: list[MountOptions]
) -> None:
    for option in options_of_mount():
        scope = declared_options()[option.name or ""][1].scope if option.name in declared_options() else None
        result = mount("--backend", BACKEND_WORDS[kind], *words_of(option)[0])
        kinds = {kind, "overlay:DIR of a directory"} if kind == "overlay" else {kind}
        is_allowed = scope is None or not kinds.isdisjoint(scope.backends)
        assert (result.exit_code == 0) == is_allowed, (kind, option.name)
        if scope is not None and not is_allowed:
            assert scope.why in result.stderr


def test_the_help_of_an_option_names_what_it_goes_with() -> None:
    text = " ".join(CliRunner().invoke(cli, ["mount", "--help-all"]).stdout.split())
    assert "fail with ENOSPC. [memory or overlay:DIR]" in text
    assert "2048 by default. [image:REF or --sandbox]" in re.sub(r" \[x>=1\]", "", text)


def test_the_document_has_what_the_options_declare() -> None:
    subprocess.run([sys.executable, REPOSITORY / "scripts" / "mount_doc.py", "--check"], check=True)


# The types of Python's arguments for these declared types.
IN_PYTHON: dict[object, object] = {tuple[str, ...]: Sequence[str], BackendSpec | None: str | None}


def test_python_takes_every_declared_option_with_its_type() -> None:
    declared = {
        name: FilePath | None if option.kind in {"file", "directory"} else IN_PYTHON.get(kind, kind)
        for name, (kind, option) in declared_options().items()
    }
    del declared["backend"]  # a positional argument
    assert get_type_hints(MountArguments) == declared | {"name": str | None}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("on_host", "did you mean exec_on_host?"),
        ("cache_timeout", "did you mean cache_timeout_s?"),
        ("no_xattrs", "did you mean xattrs?"),
        ("memory", "did you mean max_memory or memory_bytes?"),
        ("zzz", "docs/backends.md lists them"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_similar_ones(name: str, said: str, place: Path) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        mount_options("mnt", **{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"backend": 5}, 'a backend is a str, such as "overlay:DIR", not int'),
        ({"sandbox": 5}, 'a sandbox is a str, such as "image:REF", not int'),
        ({"protect": [5]}, "a pattern must be a str, not int"),
        ({"include": b"x"}, "a pattern must be a str, not int"),
        ({"exclude": ".env"}, "exclude must be a list of str, not str"),
        ({"max_bytes": "512M"}, "max_bytes must be int, not str"),
        ({"audit": 0}, "audit must be bool, not int"),
    ],
)
def test_an_argument_of_the_wrong_type_is_answered_with_the_right_one(
    arguments: dict[str, Any], said: str, place: Path
) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        mount_options("mnt", **arguments)


def test_python_names_the_arguments_as_python_has_them(place: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"backend": "host:below", "max_bytes": 1}, "max_bytes goes with memory or overlay:DIR"),
        ({"pids_limit": 5}, "pids_limit goes with image:REF or sandbox"),
        ({"snapshot_each": True}, "snapshot_each goes with container:NAME, image:REF, sandbox or exec_on_host"),
        ({"name": "a{max_bytes}b"}, "name 'a{max_bytes}b' is not a workspace name"),
    ]
    for arguments, said in wrong:
        with pytest.raises(OptionError) as caught:
            mount_options("mnt", **arguments)
        assert said in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["--sandbox", "python:3.12"],
        ["--pids-limit", "5"],
        ["--exclude", "x"],
        ["--backend", "host:below", "--foreground", "--store", "below/inside"],
        ["--backend", "host:mnt"],
        ["--max-inodes", "9" * 40],
        ["--snapshot-each"],
    ],
)
def test_the_program_itself_refuses_in_one_line(words: list[str], place: Path) -> None:
    command = [sys.executable, "-m", "vfsd.cli.main", "mount", "mnt", *words]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in {1, 2}
    errors = [line for line in done.stderr.splitlines() if line.startswith("vfsd: error: ")]
    assert len(errors) == 1
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["error"]["message"]


# Names of options of obstore's S3, Azure and Google stores, and of vfsd.
@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("secret_access_key", True),
        ("AWS_ACCESS_KEY_ID", True),
        ("session_token", True),
        ("account_key", True),
        ("azure_storage_sas_key", True),
        ("sas", True),
        ("aws_sse_customer_key_base64", True),
        ("service_account_key", True),
        ("proxy-password", True),
        ("region", False),
        ("endpoint", False),
        ("path_style", False),
        ("disassemble", False),
        ("aws_sse_kms_key_id", False),
        ("aws_sse_bucket_key_enabled", False),
    ],
)
def test_the_names_of_secret_options_of_object_stores(option: str, expected: bool) -> None:
    assert is_secret(option) is expected


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("memory", BackendSpec("memory")),
        ("host:/srv/a:b", BackendSpec("host", "/srv/a:b")),
        ("overlay:~", BackendSpec("overlay", "~")),
        ("container:web", BackendSpec("container", "web")),
        ("image:docker.io/library/python:3.12", BackendSpec("image", "docker.io/library/python:3.12")),
        ("exec:ssh a:b 'python3'", BackendSpec("exec", "ssh a:b 'python3'")),
    ],
)
def test_a_backend_string_is_a_kind_and_an_argument(text: str, spec: BackendSpec) -> None:
    assert parse_backend(text) == spec
    assert str(spec) == text


@pytest.mark.parametrize("text", ["", ":", "tape", "tape:x", "memory:", "memory:x", "Memory"])
def test_an_unknown_kind_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"is not one of memory, overlay:DIR, host:DIR, container:NAME, image:REF, exec:COMMAND$"
    ):
        parse_backend(text)


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(ValueError, match="'host:' lacks a directory after the colon"):
        parse_backend("host:")
    with pytest.raises(ValueError, match="'exec:' lacks a command that starts a Python after the colon"):
        parse_backend("exec:")


def test_a_command_that_cannot_be_split_into_words_is_refused() -> None:
    with pytest.raises(ValueError, match="No closing quotation"):
        parse_backend("exec:ssh 'host")


def test_an_entry_point_adds_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_backend(tmp_path, monkeypatch, "toy", "toy_backend:open_toy")

    assert parse_backend("toy:a:b") == BackendSpec("toy", "a:b")
    assert parse_backend("toy") == BackendSpec("toy")
    assert known_backends()[-1] == "toy:ARG"
    with pytest.raises(ValueError, match=r"exec:COMMAND, toy:ARG$"):
        parse_backend("tape:x")


def test_an_entry_point_does_not_replace_a_built_in_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_backend(tmp_path, monkeypatch, "host", "toy_backend:open_toy")

    assert known_backends().count("host:DIR") == 1
    with pytest.raises(ValueError, match="lacks a directory"):
        parse_backend("host:")
