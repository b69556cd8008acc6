"""What may be asked of a mount of a host directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vfsd.client.arguments import mount_options
from vfsd.wire.option_rules import OptionError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "served").mkdir()
    (tmp_path / "mnt").mkdir()
    return tmp_path


def test_the_directory_is_made_absolute_from_where_the_caller_is(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    assert str(mount_options("mnt", "host:served").workspace.backend) == f"host:{directory}/served"
    assert str(mount_options("mnt", "host:./served/../served").workspace.backend) == f"host:{directory}/served"


def test_a_colon_is_part_of_the_directorys_name(directory: Path) -> None:
    (directory / "a:b").mkdir()
    assert str(mount_options(directory / "mnt", f"host:{directory}/a:b").workspace.backend) == f"host:{directory}/a:b"


@pytest.mark.parametrize(("name", "error"), [("none", FileNotFoundError), ("file", NotADirectoryError)])
def test_what_is_no_directory_is_refused_by_its_path(directory: Path, name: str, error: type[OSError]) -> None:
    (directory / "file").touch()
    with pytest.raises(error) as caught:
        mount_options(directory / "mnt", f"host:{directory}/{name}")
    assert caught.value.filename == f"{directory}/{name}"


@pytest.mark.parametrize(
    ("mountpoint", "served", "said"),
    [
        ("served/inner", "served", "is inside"),
        ("mnt", "mnt/inner", "is inside the mountpoint"),
        ("served", "served", "cannot be served at itself"),
        ("link/inner", "served", "is inside"),
    ],
)
def test_a_mount_that_would_show_or_hide_itself_is_refused(
    directory: Path, mountpoint: str, served: str, said: str
) -> None:
    for place in ("served/inner", "mnt/inner"):
        (directory / place).mkdir()
    os.symlink("served", directory / "link")
    with pytest.raises(ValueError, match=said):
        mount_options(directory / mountpoint, f"host:{directory}/{served}")


def test_neighbours_whose_names_begin_alike_are_no_trouble(directory: Path) -> None:
    (directory / "served-mnt").mkdir()
    assert (
        str(mount_options(directory / "served-mnt", f"host:{directory}/served").workspace.backend)
        == f"host:{directory}/served"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": ("!",)}, "^include: .*'!'"),
        ({"exclude": ("ok", "!")}, "^exclude: .*'!'"),
        ({"store": "/dev/null"}, "^store is not a directory: /dev/null$"),
    ],
)
def test_an_invalid_value_is_reported_with_the_name_of_its_option(
    directory: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        mount_options(directory / "mnt", f"host:{directory}/served", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("host", {"max_bytes": 1}),
        ("host", {"max_inodes": 1}),
        ("host", {"archive": "x.zip"}),
        ("host", {"cache_timeout_s": -1.0}),
        ("host", {"cache_timeout_s": float("nan")}),
        ("memory", {"cache_timeout_s": 1.0}),
    ],
)
def test_options_that_mean_nothing_to_a_backend_are_refused(
    directory: Path, backend: str, options: dict[str, object]
) -> None:
    name = backend if backend == "memory" else f"host:{directory}/served"
    with pytest.raises(ValueError, match=r".+"):
        mount_options(directory / "mnt", name, **options)  # type: ignore[arg-type]
