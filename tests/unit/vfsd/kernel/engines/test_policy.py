"""Policy that the engines share: permission checks are left out only if nobody but an omnipotent root can enter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vfsd.kernel.engines.base import EngineSettings
from vfsd.kernel.engines.policy import is_omnipotent, needs_checks

EVERYTHING = 0x1FFFFFFFFFF
INITIAL_NAMESPACE = "         0          0 4294967295\n"


def proc(place: Path, capabilities: int = EVERYTHING, uid_map: str = INITIAL_NAMESPACE) -> Path:
    (place / "status").write_text(f"Name:\tvfsd\nUid:\t0\t0\t0\t0\nCapEff:\t{capabilities:016x}\n")
    (place / "uid_map").write_text(uid_map)
    return place


def test_root_with_its_capabilities_is_omnipotent(tmp_path: Path) -> None:
    assert is_omnipotent(proc(tmp_path))


@pytest.mark.parametrize("missing", [0, 1, 3, 4], ids=["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID"])
def test_root_without_one_of_its_capabilities_is_not(tmp_path: Path, missing: int) -> None:
    assert not is_omnipotent(proc(tmp_path, EVERYTHING & ~(1 << missing)))


@pytest.mark.parametrize("uid_map", ["0 1000 1\n", "0 100000 65536\n1000 1000 1\n", ""])
def test_root_of_a_user_namespace_is_not(tmp_path: Path, uid_map: str) -> None:
    assert not is_omnipotent(proc(tmp_path, uid_map=uid_map))


def test_where_nothing_says_what_root_may_it_is_not(tmp_path: Path) -> None:
    assert not is_omnipotent(tmp_path)
    (tmp_path / "uid_map").write_text(INITIAL_NAMESPACE)
    (tmp_path / "status").write_text("Name:\tvfsd\n")
    assert not is_omnipotent(tmp_path)


def test_mounts_that_others_may_enter_are_checked() -> None:
    assert needs_checks(EngineSettings("/nowhere", "x", allow_other=True))


def test_mounts_of_other_users_than_root_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert needs_checks(EngineSettings("/nowhere", "x"))
