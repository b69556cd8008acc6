"""Paths as agents write them."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ArchiveError
from protocol.paths import CallLimits, decode, encode, located, normalise


@pytest.mark.parametrize(
    ("path", "normal"),
    [
        ("a", "a"),
        ("/a", "a"),
        ("//a//b//", "a/b"),
        ("./a/./b/.", "a/b"),
        ("a/../b", "b"),
        ("../../a", "a"),
        ("a/b/../../..", "."),
        ("", "."),
        (".", "."),
        ("/", "."),
        ("...", "..."),
        ("a b/ c", "a b/ c"),
        ("a\\b", "a\\b"),
        ("~/x", "~/x"),
    ],
)
def test_a_path_is_normalised(path: str, normal: str) -> None:
    assert normalise(path) == normal


@given(st.text(st.sampled_from("ab./")))
def test_a_normalised_path_stays_below_the_root_and_is_normalised_already(path: str) -> None:
    normal = normalise(path)

    assert normalise(normal) == normal
    assert normal == "." or not {"", ".", ".."}.intersection(normal.split("/"))


@pytest.mark.parametrize("path", ["a\0b", "\0", "\ud800"])
def test_what_no_kernel_can_have_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="path"):
        normalise(path)


def test_only_text_is_a_path() -> None:
    with pytest.raises(TypeError, match="bytes"):
        normalise(b"a")  # type: ignore[arg-type]


@given(st.binary(min_size=1).filter(lambda path: b"\0" not in path and normalise(decode(path)) == decode(path)))
def test_every_name_of_a_kernel_survives_the_way_to_text_and_back(path: bytes) -> None:
    assert encode(decode(path)) == path or decode(path) == "."


def test_the_root_has_no_bytes() -> None:
    assert (encode("."), decode(b"")) == (b"", ".")


@pytest.mark.parametrize(
    ("limits", "path"),
    [
        (CallLimits(), "/".join("a" * 16)),
        (CallLimits(), "n" * 80),
        (CallLimits(), "é" * 80),
        (CallLimits(depth=20, segment=200), "/".join(["n" * 200] * 20)),
    ],
)
def test_a_path_within_the_limits_may_be_created(limits: CallLimits, path: str) -> None:
    limits.check_new(path)


@pytest.mark.parametrize(("path", "match"), [("/".join("a" * 17), "deep"), ("a/" + "n" * 81 + "/b", "81")])
def test_a_path_over_the_limits_may_not_be_created(path: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CallLimits().check_new(path)


def test_a_name_has_up_to_255_bytes() -> None:
    assert normalise("a/" + "n" * 255) == "a/" + "n" * 255
    for path in ("n" * 256, "a/" + "é" * 128 + "/b"):
        with pytest.raises(
            ValueError, match=r"a name in a path has 256 bytes .*, the limit is 255: use a shorter name"
        ):
            normalise(path)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (OSError(errno.ENOENT, "gone", "inode 5"), FileNotFoundError, (errno.ENOENT, "gone")),
        (OSError("strange"), OSError, (errno.EIO, "Input/output error")),
        (OSError(errno.EROFS, "refused"), PermissionError, (errno.EROFS, "refused")),  # a lack of permission
        # A class that says more than its errno is kept.
        (IsADirectoryError(errno.ENOTEMPTY, "full", "a/b"), IsADirectoryError, (errno.ENOTEMPTY, "full")),
    ],
)
def test_an_error_is_given_the_path_and_an_errno_and_its_class(
    error: OSError, kind: type[OSError], said: tuple[int, str]
) -> None:
    with pytest.raises(kind, match="a/b") as caught, located("a/b"):
        raise error

    assert (caught.value.errno, caught.value.strerror, caught.value.filename) == (*said, "a/b")


def test_an_error_of_the_contract_is_left_as_it_is() -> None:
    with pytest.raises(ArchiveError) as caught, located("a"):
        raise ArchiveError("refused", "files/x")

    assert caught.value.entry == "files/x"
