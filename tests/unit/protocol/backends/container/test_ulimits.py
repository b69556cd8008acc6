"""Which limits a container is made with where Podman may not set its own defaults."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.backends.container.podman.ulimits import PODMAN_DEFAULT, own_hard_limits, permitted_ulimits


def inspected(**limits: int) -> dict[str, Any]:
    return {
        "HostConfig": {
            "Ulimits": [{"Name": f"RLIMIT_{name.upper()}", "Soft": most, "Hard": most} for name, most in limits.items()]
        }
    }


def test_limits_that_can_be_set_are_left_alone() -> None:
    assert permitted_ulimits(inspected(nofile=1024, nproc=4096), {"nofile": 20000, "nproc": 4096}) == []
    assert permitted_ulimits(inspected(nofile=PODMAN_DEFAULT), {}) == []
    assert permitted_ulimits({"HostConfig": {"Ulimits": None}}, {"nofile": 1}) == []
    assert permitted_ulimits({}, {"nofile": 1}) == []


@pytest.mark.parametrize("default", [PODMAN_DEFAULT, -1])
def test_a_limit_above_the_hard_one_is_lowered_and_the_others_are_kept(default: int) -> None:
    assert permitted_ulimits(inspected(nofile=default, nproc=100, core=0), {"nofile": 20000, "nproc": 5000}) == [
        {"Name": "nofile", "Soft": 20000, "Hard": 20000},
        {"Name": "nproc", "Soft": 100, "Hard": 100},
        {"Name": "core", "Soft": 0, "Hard": 0},
    ]


def test_the_hard_limits_are_those_of_this_process() -> None:
    assert set(own_hard_limits()) <= {"nofile", "nproc"}
    assert all(limit > 0 for limit in own_hard_limits().values())
