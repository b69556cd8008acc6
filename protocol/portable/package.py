"""build_program: packs the program and the modules that it shares with vfsd into one file, vfsd-fs.pyz.

The file is a ZIP archive that Python runs (the standard library's module `zipapp` describes the format).  The same
version of vfsd gives the same bytes.

The modules are those of `protocol` as they are, but for two changes to their text: what Python 3.8 or its standard
library lacks is imported from `protocol.portable.backports`, and type aliases, which it could not evaluate, are None.
One module is replaced, because it imports a package that is not in the standard library (_REPLACED).
"""

from __future__ import annotations

import ast
import errno
import functools
import io
import os
import re
import tempfile
import zipfile
from importlib import resources
from typing import Final

_SHEBANG: Final = b"#!/usr/bin/env python3\n"
_DATE: Final = (1980, 1, 1, 0, 0, 0)  # the first that ZIP can express
_MODULES: Final = (
    "protocol.adapters.path_files",
    "protocol.adapters.host_files",
    "protocol.adapters.plain_filesystem",
    "protocol.errors",
    "protocol.execution.supervisor",
    "protocol.filesystem",
    "protocol.linux.beneath",
    "protocol.linux.portable",
    "protocol.linux.posix_acl",
    "protocol.linux.regular_file",
    "protocol.linux.syscalls",
    "protocol.paths",
    "protocol.portable.backports",
    "protocol.portable.file_commands",
    "protocol.portable.program",
    "protocol.portable.wickfs",
    "protocol.search.grep",
    "protocol.search.patterns",
    "protocol.search.walk",
    "protocol.streams",
    "protocol.tools.edits",
    "protocol.tree",
    "protocol.types",
)
_REPLACED: Final = {"protocol.search.expression": "protocol.portable.expression"}
_KEPT: Final = frozenset(
    {
        "protocol.execution.supervisor",  # runs alone
        "protocol.linux.portable",
        "protocol.portable.backports",
        "protocol.portable.expression",
    }
)
# Runs on any Python, also on one that cannot compile the other modules.
_MAIN: Final = """\
import os, sys

if sys.version_info < (3, 8):
    version = ".".join(map(str, sys.version_info[:3]))
    print('{"ok":false,"error":"vfsd-fs needs Python 3.8 or newer, and this is %s"}' % version)
    sys.exit(1)

from protocol.portable import backports  # noqa: F401


if os.path.basename(sys.argv[0]) == "wickfs":
    from protocol.portable.wickfs import main
else:
    from protocol.portable.program import main

sys.exit(main(sys.argv[1:]))
"""


@functools.cache  # 0.1 s of CPU
def build_program() -> bytes:
    """Return the content of vfsd-fs.pyz."""
    files = {"__main__.py": _MAIN}
    sources = {name: name for name in _MODULES} | _REPLACED
    for name, source in sources.items():
        package, _, module = source.rpartition(".")
        files[name.replace(".", "/") + ".py"] = _converted(source, _read(package, module))
        for end in range(1, name.count(".") + 1):
            files.setdefault("/".join(name.split(".")[:end]) + "/__init__.py", "")
    content = io.BytesIO(_SHEBANG)
    content.seek(0, io.SEEK_END)
    with zipfile.ZipFile(content, "w") as archive:
        for path, text in sorted(files.items()):
            member = zipfile.ZipInfo(path, _DATE)
            member.external_attr = 0o100644 << 16
            # Stored: zlib's versions give different bytes, and a Python may have been built without it.
            archive.writestr(member, text.encode(), zipfile.ZIP_STORED)
    return content.getvalue()


def write_program(path: str) -> int:
    """Write vfsd-fs.pyz to `path`, executable, completely or not at all; return its size in bytes.

    A file that is not a vfsd-fs.pyz is not replaced: FileExistsError.  Other errors are OSError and name `path`.
    """
    content = build_program()
    try:
        with open(path, "rb") as file:
            is_program = file.read(len(_SHEBANG) + 2) in {_SHEBANG + b"PK", b""}
    except FileNotFoundError:
        is_program = True
    if not is_program:
        raise FileExistsError(errno.EEXIST, "the file exists, and is no vfsd-fs.pyz: remove it, or name another", path)
    directory = os.path.dirname(os.path.abspath(path))
    try:
        descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=".vfsd-fs-")
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(descriptor, 0o755)
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, path) from None
        raise
    return len(content)


def _read(package: str, module: str) -> str:
    return resources.files(package).joinpath(f"{module}.py").read_text("utf-8")


_IMPORTS: Final = re.compile(
    r"^(\s*)from (?:typing|dataclasses|datetime|itertools|protocol.values) import ", re.MULTILINE
)
_MSGSPEC: Final = re.compile(r"^import msgspec$", re.MULTILINE)


def _converted(module: str, source: str) -> str:
    """Make a module run on Python 3.8; see the module's docstring."""
    if module in _KEPT:
        return source
    text = _without_aliases(source)
    text = _IMPORTS.sub(r"\1from protocol.portable.backports import ", text)
    return _MSGSPEC.sub("from protocol.portable import backports as msgspec", text)


def _without_aliases(source: str) -> str:
    """Set type aliases to None, except those of literals, whose values are used."""
    lines = source.splitlines(keepends=True)
    for node in reversed(ast.parse(source).body):
        if (
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.annotation) == "TypeAlias"
            and node.value is not None
            and not ast.unparse(node.value).startswith("Literal[")
        ):
            first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            lines[first : last + 1] = [f"{ast.unparse(node.target)} = None\n"]
    return "".join(lines)
