"""Python's interpreter: its settings in a daemon, packages that are missing or not vfsd's, and tracebacks.

The settings are for serving requests: huge pages, rare garbage collections, short thread switches.
`bench/NOTES.md` has the measurement of each.

Imports nothing from `protocol`, because that may be the package of an unrelated distribution.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib.util
import os
import shlex
import sys
import traceback
from collections.abc import Mapping
from typing import Final

import vfsd

# Faulting in single pages costs more than filling them: with huge pages a write of 1 MiB takes a quarter of the time.
# glibc reads this variable when a process starts (GNU libc manual, "Memory Allocation Tunables"); other C libraries
# ignore it.
_TUNABLES: Final = "GLIBC_TUNABLES"
_HUGE_PAGES: Final = "glibc.malloc.hugetlb=1"

_M_TRIM_THRESHOLD: Final = -1  # mallopt(3)
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_HEAP_STEP_BYTES: Final = 16 << 20  # a multiple of the huge page size, 2 MiB on x86
_MMAP_BYTES: Final = 32 << 20  # glibc's maximum, so that content blocks come from the heap

# Inodes and blocks refer to each other by number, so there are hardly any reference cycles to collect.  With Python's
# default of 700, a burst of creations would run the collector every few hundred files.
_COLLECT_AFTER: Final = (10_000, 20, 10)
# How long a computing thread (an export, a diff) keeps the interpreter lock; a request through the mount waits for up
# to four such intervals.  Python's default is 5 ms.
_SWITCH_INTERVAL_S: Final = 0.00002
# How much the kernel may extend a wait to combine timer interrupts (prctl(2)).  Its default of 50 us exceeds the wait
# for the interpreter lock.
_PR_SET_TIMERSLACK: Final = 29
_PR_SET_NAME: Final = 15
_PR_SET_PDEATHSIG: Final = 1
_TIMER_SLACK_NS: Final = 1


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a new daemon: `inherited`, with huge pages enabled unless it sets that tunable."""
    tunables = inherited.get(_TUNABLES, "")
    if "glibc.malloc.hugetlb" in tunables:
        return dict(inherited)
    return {**inherited, _TUNABLES: f"{tunables}:{_HUGE_PAGES}" if tunables else _HUGE_PAGES}


def set_name(name: str) -> None:
    """Set the name of this process in ps(1) and top(1), which show 15 bytes of it."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def end_with_parent(number: int) -> None:
    """Have the kernel send this process the signal `number` when its parent ends; 0: none."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def set_up(name: str) -> None:
    """Apply the settings to this process.  Skips those that the C library lacks.

    `name` is that of the process in ps(1) and top(1), which show 15 bytes of it.
    """
    if os.environ.get(_TUNABLES) == _HUGE_PAGES:
        del os.environ[_TUNABLES]  # for this process only, not for its children
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()  # modules live as long as the process
    gc.set_threshold(*_COLLECT_AFTER)
    set_name(name)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMER_SLACK_NS))  # new threads inherit it
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is not None:
        # A heap for each thread would hold a huge page each, and threads seldom allocate without the interpreter lock.
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TOP_PAD, _HEAP_STEP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 4 * _HEAP_STEP_BYTES)


# -- packages ---------------------------------------------------------------------------------------
def foreign_protocol() -> tuple[str, str] | None:
    """Describe the `protocol` that Python finds instead of vfsd's, and what to do; None if it finds vfsd's."""
    from importlib.metadata import packages_distributions  # noqa: PLC0415 start-up: an error has time

    spec = importlib.util.find_spec("protocol")
    found = os.path.dirname(spec.origin) if spec and spec.origin else None
    expected = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(vfsd.__file__))), "protocol")
    others = sorted(set(packages_distributions().get("protocol", [])) - {"vfsd"})
    if found is not None and os.path.realpath(found) == os.path.realpath(expected) and not others:
        return None
    if found is None:
        return "vfsd's package `protocol` is not installed", f"install vfsd again: {install_command()}"
    names = f" of the distribution {', '.join(others)}" if others else ""
    advice = f"uninstall it and install vfsd again, or install vfsd in an environment of its own ({sys.executable})"
    return f"the package `protocol` in {found}{names} is in the way of vfsd's", advice


def missing_package(feature: str, error: ImportError, extra: str = "container") -> OSError:
    """Return the error for `feature`, which needs the packages of an extra."""
    return OSError(errno.EOPNOTSUPP, f"{feature} lacks a package ({error}): {install_command(extra)}")


def install_command(extra: str | None = None) -> str:
    """Return the shell command that installs vfsd again as it is installed here, with the packages of `extra`.

    It names the checkout, wheel or URL that this installation was made from: a package index need not have vfsd.
    """
    place, url, is_editable = _installed_from()
    extras = f"[{extra}]" if extra else ""
    requirement = shlex.quote(f"{place or 'vfsd'}{extras}" if not url else f"vfsd{extras} @ {url}")
    editable = "--editable " if is_editable else ""
    # The files in which `uv tool` and pipx keep what they know of an environment.
    if os.path.exists(os.path.join(sys.prefix, "uv-receipt.toml")):
        return f"uv tool install --force {editable}{requirement}"
    if os.path.exists(os.path.join(sys.prefix, "pipx_metadata.json")):
        return f"pipx install --force {editable}{requirement}"
    if "/archive-v" in sys.prefix:  # uv's cache, in which `uvx` makes its environments
        return f"uvx --from {requirement} vfsd"
    python = shlex.quote(sys.executable)
    has_pip = importlib.util.find_spec("pip") is not None
    pip = f"{python} -m pip install" if has_pip else f"uv pip install --python {python}"
    return f"{pip} {editable}{requirement}"


def _installed_from() -> tuple[str | None, str | None, bool]:
    """Return the path or the URL that vfsd was installed from, and whether it is an editable installation.

    Source: PEP 610, direct_url.json, which is missing for what comes from a package index.
    """
    # Start-up: an error has time.
    import json  # noqa: PLC0415
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415
    from urllib.parse import unquote, urlsplit  # noqa: PLC0415

    checkout = os.path.dirname(os.path.dirname(os.path.abspath(vfsd.__file__)))
    try:
        record = json.loads(distribution("vfsd").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        record = {}
    url = record.get("url")
    if url is None:
        is_checkout = os.path.exists(os.path.join(checkout, "pyproject.toml"))
        return (checkout, None, True) if is_checkout else (None, None, False)
    if url.startswith("file:"):
        return unquote(urlsplit(url).path), None, bool(record.get("dir_info", {}).get("editable"))
    source = record.get("vcs_info")
    return None, f"{source['vcs']}+{url}@{source['commit_id']}" if source else url, False


def clear_frames(error: BaseException) -> None:
    """Remove the tracebacks of `error`, its group, cause and context, and the variables of all finished frames in them.

    An error that is stored in a local variable forms a reference cycle with its traceback, whose frames keep their
    variables alive: a manifest of hundreds of megabytes, for example.  The collector may find the cycle only hours
    later (_COLLECT_AFTER).  The log record of an error keeps its traceback, and prints the same lines.
    """
    waiting, seen = [error], set[int]()
    while waiting:
        error = waiting.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None  # a cleared frame still has its function, and so what that encloses
        waiting += [other for other in (error.__cause__, error.__context__) if other is not None]
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
