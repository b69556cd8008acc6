"""Starts the helper in a container: vfsd sends its sources over the stream on which the helper then serves.

The command is `python3 -I -S -c LOADER`, which reads a program of known length from standard input.  The program
creates the helper's modules and calls `main`.  So nothing is installed in the image, and nothing is left there.  A
relay to a helper that runs already (`protocol.backends.container.helper.relay`) is started in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import resources
from typing import Final

PYTHONS: Final = ("python3", "python", "/usr/local/bin/python3", "/usr/bin/python3", "/usr/libexec/platform-python")
# In the order of their imports.
HELPER_MODULES: Final = (
    "protocol.linux.portable",
    *(
        f"protocol.backends.container.helper.{name}"
        for name in ("wire", "inode_table", "files", "trees", "sessions", "answers", "serve")
    ),
)
RELAY_MODULES: Final = (
    "protocol.linux.portable",
    *(f"protocol.backends.container.helper.{name}" for name in ("wire", "sessions", "relay")),
)
_LOADER: Final = """\
import os
data = b""
while len(data) < {length}:
    more = os.read(0, {length} - len(data))
    if not more:
        raise SystemExit(1)
    data += more
exec(data)
"""
_PROGRAM: Final = """\
import sys, types
for name, source in {sources!r}:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
module.main({arguments!r})
"""


@functools.cache
def helper_source(module: str) -> str:
    """The source of one of HELPER_MODULES, or RELAY_MODULES, as it was when it was first asked for."""
    package, _, name = module.rpartition(".")
    return resources.files(package).joinpath(f"{name}.py").read_text("utf-8")


def read_sources() -> None:
    """Read all sources now: later the files may be those of another version of vfsd."""
    for module in {*HELPER_MODULES, *RELAY_MODULES}:
        helper_source(module)


def helper_program(directory: str) -> bytes:
    """The program that serves `directory`, and creates it if it is missing; to be sent first."""
    return _program(HELPER_MODULES, [directory])


def relay_program(name: bytes, secret: bytes, hold_s: int) -> bytes:
    """The program that hands its streams over to the helper with this name and secret, which holds for `hold_s`."""
    return _program(RELAY_MODULES, [name.hex(), secret.hex(), str(hold_s)])


def _program(modules: Sequence[str], arguments: list[str]) -> bytes:
    sources = [(name, helper_source(name)) for name in modules]
    return _PROGRAM.format(sources=sources, arguments=arguments).encode()


def helper_command(program: bytes, python: str = PYTHONS[0]) -> list[str]:
    """The command to run in the container before `program` is sent."""
    # -I -S: nothing in the workspace is imported.
    return [python, "-I", "-S", "-c", _LOADER.format(length=len(program))]
