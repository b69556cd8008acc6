"""Backend strings, those of installed packages included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.toy_backend import install_backend
from vfsd.wire.options import BackendSpec, known_backends, parse_backend


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
