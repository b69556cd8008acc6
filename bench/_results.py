"""Figures of a run: cells, their summary, the time that a run may take, and the file that holds the results.

A cell has one value in seconds for each round.  The values of all file systems at the same position are from the same
round, so ratios are computed for each round.  A file system that was too slow has the first rounds only.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Cells = dict[str, list[float]]  # file system -> seconds, a value a round
Row = dict[str, dict[str, Any]]  # file system -> its summary, or {"gap": reason}


def ratios(seconds: list[float], others: list[float]) -> list[float]:
    """Return `seconds` divided by `others`, round by round."""
    return [here / there for here, there in zip(seconds, others, strict=False)]


def summary(cells: Cells, failed: Mapping[str, str], limit: str) -> Row:
    """Return medians, the ratios to `limit` (median, lowest, highest), and the seconds of each round."""
    found: Row = {}
    for name, seconds in cells.items():
        if name in failed or not seconds or not cells[limit]:
            found[name] = {"gap": failed.get(name, "not measured")}
            continue
        of_limit = ratios(seconds, cells[limit])
        found[name] = {
            "seconds": statistics.median(seconds),
            "ratio": statistics.median(of_limit),
            "low": min(of_limit),
            "high": max(of_limit),
            "rounds": len(seconds),
            "each_s": [float(f"{each:.4g}") for each in seconds],
        }
    return found


class Budget:
    """The time until `total_s` seconds from now (None: no limit)."""

    def __init__(self, total_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = None if total_s is None else clock() + total_s

    def allows(self, seconds: float) -> bool:
        """Return whether something that takes `seconds` ends in time; 0: whether any time is left."""
        return self._end is None or self._clock() + seconds < self._end


def read(path: str | Path) -> dict[str, Any]:
    """Return the results in `path`; empty if the file does not exist.  ValueError if it is not such a file."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} has no results: delete it, or name another file")  # noqa: TRY004
    return found


def update(path: str | Path, parts: Mapping[str, object]) -> None:
    """Replace the top-level `parts` of the results in `path` and keep the others, which other benches wrote."""
    write_whole(path, json.dumps({**read(path), **parts}, indent=1) + "\n")


def save(path: str | Path, parts: Mapping[str, object]) -> None:
    """Update the results in `path`; exit with a message if they cannot be written."""
    try:
        update(path, parts)
    except (OSError, ValueError) as error:
        sys.exit(f"the results could not be written to {path}, which is as it was before: {error}")


def check_writable(path: str | Path) -> None:
    """Write the results in `path` as they are, before a run takes minutes.  OSError and ValueError as `update`."""
    update(path, {})


def write_whole(path: str | Path, text: str) -> None:
    """Replace the content of `path` by `text`, completely or not at all."""
    path = Path(path)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
