"""Build the extensions of `protocol.compiled` from the modules below, in place: `make compiled`."""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from setuptools import Extension

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from protocol.compiled import FOLDER, RECORD, extension_path, recorded  # noqa: E402

GROUP = "vfsd_compiled"
BUILD = "build/compiled"
SUFFIX = EXTENSION_SUFFIXES[0]
CC = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))
_NATIVE = "vfsd/kernel/engines/native/"
_MEMORY = "protocol/backends/memory/"
# The modules that a request of the default mount runs through.
MODULES = [
    *(f"{_NATIVE}{name}.py" for name in ("observation", "operations", "replies", "requests", "session", "wire")),
    *(f"vfsd/daemon/audit/{name}.py" for name in ("log", "processes")),
    *(f"{_MEMORY}{name}.py" for name in ("blocks", "content", "entries", "files", "history/undo", "inode", "ledger")),
    *(f"{_MEMORY}{name}.py" for name in ("limits", "state", "xattrs")),
    "protocol/directory_cookies.py",
    "protocol/stored_attributes.py",
]


def _imported(path: str) -> set[str]:
    """Return the sources that a source imports: the constants of these are part of its extension, too."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    return {path for name in names if os.path.isfile(path := name.replace(".", "/") + ".py")}


def _compile(extension: Extension, source: str) -> str:
    """Compile one C file; return the object file."""
    target = source.removesuffix(".c") + ".o"
    includes = [f"-I{path}" for path in (*extension.include_dirs, sysconfig.get_path("include"))]
    flags = [*CC, "-fPIC", "-DNDEBUG", *extension.extra_compile_args, *includes]
    subprocess.run([*flags, "-c", source, "-o", target], check=True)
    return target


def main() -> None:
    """Build all extensions anew."""
    os.chdir(ROOT)
    from mypyc.build import mypycify  # noqa: PLC0415  takes a second

    shutil.rmtree(BUILD, ignore_errors=True)
    for directory, _, names in os.walk(FOLDER):
        for name in names:
            if name == os.path.basename(RECORD) or name.endswith(SUFFIX):
                os.unlink(os.path.join(directory, name))
    sources = recorded(sorted({*MODULES, *(found for path in MODULES for found in _imported(path))}))
    extensions = mypycify(
        ["--config-file=pyproject.toml", *MODULES],
        opt_level="2",
        debug_level="0",
        multi_file=True,  # so that all CPUs compile
        group_name=GROUP,
        target_dir=BUILD,
    )
    with ThreadPool(os.cpu_count()) as pool:
        work = [(each, path) for each in extensions for path in each.sources]
        objects = pool.starmap(_compile, work, chunksize=1)
    for extension in extensions:
        mine = [made for (each, _), made in zip(work, objects, strict=True) if each is extension]
        path = extension_path(extension.name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        subprocess.run([*CC, "-shared", *mine, "-o", path], check=True)
    with open(RECORD, "w", encoding="utf-8") as file:
        json.dump({"modules": [each.name for each in extensions], "sources": sources}, file, indent=1)


if __name__ == "__main__":
    main()
