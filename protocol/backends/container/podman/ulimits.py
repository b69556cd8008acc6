"""Resource limits of containers, lowered to what Podman can set on this machine.

Podman gives a container of root's a hard limit of 1048576 open files and processes unless containers.conf sets another.
If Podman itself has a lower hard limit and may not raise it (a container without CAP_SYS_RESOURCE, as in CI services),
the container is created but does not start: "error setting rlimit type 7: operation not permitted".

Source: setrlimit(2), containers.conf(5) "default_ulimits".
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any, Final

PODMAN_DEFAULT: Final = 1048576  # of open files and of processes, for root
# Only the limits that Podman sets by default; others were requested explicitly.
_NAMES: Final = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}


def own_hard_limits() -> dict[str, int]:
    """This process's finite hard limits, by Podman's names."""
    limits = {name: resource.getrlimit(number)[1] for name, number in _NAMES.items()}
    return {name: limit for name, limit in limits.items() if limit != resource.RLIM_INFINITY}


def permitted_ulimits(container: Mapping[str, Any], hard_limits: Mapping[str, int]) -> list[dict[str, Any]]:
    """The limits with which to create `container` (as Podman inspects it) again; empty if its own can be set.

    Limits above `hard_limits` are lowered to them.
    """
    given = {
        str(limit["Name"]).lower().removeprefix("rlimit_"): limit
        for limit in container.get("HostConfig", {}).get("Ulimits") or ()
    }
    if not any(_exceeds(limit, hard_limits.get(name)) for name, limit in given.items()):
        return []
    return [
        {"Name": name, **{kind: _lowered(limit[kind], hard_limits.get(name)) for kind in ("Soft", "Hard")}}
        for name, limit in given.items()
    ]


def _exceeds(limit: Mapping[str, Any], most: int | None) -> bool:
    return int(limit["Hard"]) != _lowered(limit["Hard"], most)


def _lowered(value: int, most: int | None) -> int:
    if most is None:
        return value
    return most if value < 0 else min(value, most)  # -1: no limit
