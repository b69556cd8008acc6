"""Value: takes the place of `protocol.values.Value` in vfsd-fs.pyz, which has no msgspec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Value"]


class Value:
    """An immutable value: `class Point(Value)` with annotated fields."""

    def __init_subclass__(cls, **_options: Any) -> None:
        dataclass(frozen=True)(cls)
