"""Scripts: a sequence of calls as text that people read and that can be run again, and its reduction.

    root: mkdir(b'a', 0o777)
    1001: open(b'a/f', 0x42, 0o644, 0)

A script is a shell script: run with a directory (of any file system) it makes the calls there and prints what
each answered, so that `diff` shows where two file systems part.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from tests.differential.calls import OPERATIONS, WORKERS, Call

__all__ = ["parse", "reduce", "render", "script"]

_LINE: Final = re.compile(r"(root|\d+): (\w+)(\(.*\))")
_USERS: Final = tuple("root" if uid == 0 else str(uid) for uid, _, _ in WORKERS)
_HEAD: Final = """#!/bin/sh
# Run as root from the repository's root, once in an empty directory of each file system; compare what they print:
#   sh script.sh DIRECTORY
exec python3 -m tests.differential.replay "$1" <<'CALLS'
"""
_OCTAL: Final = frozenset({"mode", "falloc mode"})
_Fails = Callable[[Sequence[Call]], bool]


def _argument(kind: str, value: Any) -> str:
    if kind == "mode":
        return f"0o{value:o}"
    if kind == "flags":
        return f"0x{value:x}"
    return repr(value)


def render(call: Call) -> str:
    """One call as a line."""
    kinds = OPERATIONS[call.operation].kinds
    shown = ", ".join(_argument(kind.name, value) for kind, value in zip(kinds, call.args, strict=True))
    return f"{_USERS[call.worker]}: {call.operation}({shown}{',' if len(kinds) == 1 else ''})"


def script(calls: Sequence[Call]) -> str:
    """The whole script."""
    return _HEAD + "\n".join(render(call) for call in calls) + "\nCALLS\n"


def parse(text: str) -> list[Call]:
    """The calls of a script; other lines are passed over."""
    calls = []
    for line in text.splitlines():
        if match := _LINE.fullmatch(line.strip()):
            user, operation, args = match.groups()
            calls.append(Call(_USERS.index(user), operation, tuple(ast.literal_eval(args))))
    return calls


# -- reduction -------------------------------------------------------------------------------------
def reduce(calls: Sequence[Call], fails: _Fails) -> list[Call]:
    """A part of `calls` that still `fails`, from which nothing can be left out, with the plainest arguments."""
    small = _fewer(list(calls), fails)
    small = _plainer(small, fails)
    return _fewer(small, fails)


def _fewer(calls: list[Call], fails: _Fails) -> list[Call]:
    """Delta debugging: leave out ever smaller pieces, from the end, as long as it fails."""
    size = max(1, len(calls) // 2)
    while True:
        end, removed = len(calls), False
        while end > 0:
            start = max(0, end - size)
            shorter = calls[:start] + calls[end:]
            if shorter and fails(shorter):
                calls, removed = shorter, True
            end = start
        if size == 1:
            if not removed:
                return calls
        else:
            size = max(1, size // 2)


def _plainer(calls: list[Call], fails: _Fails) -> list[Call]:
    """Replace each worker and argument by the first of its alphabet, one by one, as long as it fails."""
    for number, call in enumerate(calls):
        if call.worker:
            calls = _try(calls, number, Call(0, call.operation, call.args), fails)
        for place, kind in enumerate(OPERATIONS[call.operation].kinds):
            now = calls[number]
            if now.args[place] != kind.values[0]:
                args = (*now.args[:place], kind.values[0], *now.args[place + 1 :])
                calls = _try(calls, number, Call(now.worker, now.operation, args), fails)
    return calls


def _try(calls: list[Call], number: int, instead: Call, fails: _Fails) -> list[Call]:
    changed = [*calls[:number], instead, *calls[number + 1 :]]
    return changed if fails(changed) else calls
