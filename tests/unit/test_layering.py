"""Imports go one way: vfsd -> protocol, and inside each package downward only (docs/architecture.md).

Read with `ast`, never imported: an import inside a function or under TYPE_CHECKING points downward too.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# Lowest row first: the layout of docs/architecture.md.  A module may import from the rows below its own, and
# within its own name; two names of one row do not import each other.  A name covers what is below it in the package,
# unless that is named itself.
LAYERS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "protocol": (
        ("protocol.compiled",),
        ("protocol.errors", "protocol.values"),
        ("protocol.types", "protocol.paths", "protocol.directory_cookies"),
        ("protocol.tree",),
        ("protocol.linux", "protocol.streams", "protocol.execution", "protocol.diff"),
        ("protocol.volume", "protocol.search"),
        ("protocol.volume_extensions", "protocol.stored_attributes"),
        ("protocol.volume_durability",),
        ("protocol.filesystem", "protocol.archive", "protocol.merge", "protocol.tool_messages"),
        ("protocol.store", "protocol.journal"),
        ("protocol.adapters",),
        ("protocol.backends",),
        ("protocol.tools", "protocol.testing", "protocol.snapshot_manager"),
        ("protocol.portable", "protocol.drafts"),
        ("protocol",),
    ),
    "vfsd": (
        ("vfsd.operations",),
        ("vfsd.wire",),
        ("vfsd.machine",),
        ("vfsd.kernel",),
        ("vfsd.client",),
        ("vfsd.daemon",),
        ("vfsd",),
        ("vfsd.integrations", "vfsd.web"),
        ("vfsd.cli",),
    ),
}
# Pairs that point downward and are forbidden all the same: who drives a daemon, and the daemon, share the wire only.
APART: tuple[tuple[str, str], ...] = (("vfsd.daemon", "vfsd.client"), ("vfsd.client", "vfsd.daemon"))

# The daemon and the engines work with every volume that keeps its contract, so only the registry imports backends.
# `vfsd.daemon.exec` runs commands in containers: it imports modules that hold no volume.
BACKEND_IMPORTERS: Mapping[str, tuple[str, ...]] = {
    "vfsd.daemon.backends": ("protocol.backends",),
    "vfsd.daemon.exec": (
        "protocol.backends.container.exec",
        "protocol.backends.container.podman",
        "protocol.backends.container.workspace",
    ),
}

# Who alone may import a distribution or a module of the standard library.
OWNERS: Mapping[str, tuple[str, ...]] = {
    "pyfuse3": ("vfsd.kernel.engines.pyfuse3",),
    "re2": ("protocol.search",),
    "obstore": ("protocol.store.object_store.storage",),
    "click": ("vfsd.cli",),
    "rich": ("vfsd.cli",),
    "anyio": ("vfsd.client", "vfsd.integrations", "vfsd.cli.servers", "vfsd.web"),
    "starlette": ("vfsd.web",),
    "jinja2": ("vfsd.web.rendering",),
    "hypercorn": ("vfsd.web.server",),
    "claude_agent_sdk": ("vfsd.integrations.claude_agent",),
    "mcp": ("vfsd.integrations.mcp",),
    "mcp_types": ("vfsd.integrations.mcp",),
    "weakincentives": ("vfsd.integrations.weakincentives",),
    "uvicorn": ("vfsd.integrations.mcp.http",),
    "trio": (
        "vfsd.daemon",
        "vfsd.kernel",
        "protocol.execution",
        "protocol.backends.container",
        "protocol.backends.remote",
        "vfsd.web.server",
    ),
    "podman": ("protocol.backends.container.podman",),
    "h11": ("protocol.backends.container.podman",),
    # System calls, and the layouts of other programs' structures.
    "ctypes": (
        "protocol.linux",
        "protocol.execution.supervisor",  # these two are programs of their own, with the standard library only
        "protocol.backends.container.helper",
        "vfsd.machine.interpreter",
        "vfsd.kernel",
    ),
    "struct": (
        "protocol.linux",
        "protocol.archive.records",
        "protocol.journal",
        "protocol.store",
        "protocol.backends.container.helper",
        "protocol.backends.container.podman",
        "vfsd.kernel.engines.native",
        "vfsd.wire.sockets",
    ),
    "vfsd": ("vfsd",),
}


@dataclass(frozen=True, slots=True)
class Import:
    importer: str
    imported: str
    place: str  # file:line
    is_deferred: bool = False  # inside a function, or for the type checker only

    def __str__(self) -> str:
        return f"{self.place}: {self.importer} imports {self.imported}"


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def module_names(root: Path, package: str) -> dict[str, Path]:
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(root: Path, *packages: str) -> list[Import]:
    """Every import in the packages.  `from a import b` is of module a.b where there is one, else of a."""
    modules = {name: path for package in packages for name, path in module_names(root, package).items()}
    found: list[Import] = []
    for name, path in modules.items():
        source = ast.parse(path.read_bytes(), str(path))
        for node, is_deferred in _import_nodes(source):
            place = f"{path.relative_to(root)}:{node.lineno}"
            targets = [one for one in _targets(node, name, path, modules) if not _is_for_version(one, name, source)]
            found.extend(Import(name, target, place, is_deferred) for target in targets)
    return found


@functools.cache
def imports_of_repository() -> list[Import]:
    return imports_of(REPOSITORY, "protocol", "vfsd")


def _is_for_version(target: str, name: str, source: ast.Module) -> bool:
    """Whether a module imports the package that it is in, and uses only its version and its file's path.

    A package is imported before its modules, so every module finds these two.
    """
    if "." in target or not is_within(name, target):
        return False
    used = {
        node.attr
        for node in ast.walk(source)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == target
    }
    return bool(used) and used <= {"__version__", "__file__"}


def _import_nodes(node: ast.AST, *, is_deferred: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, is_deferred
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
        isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    ):
        is_deferred = True
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):  # an expression contains no import
            yield from _import_nodes(child, is_deferred=is_deferred)


def _targets(node: ast.Import | ast.ImportFrom, name: str, path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        inside = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        base = ".".join([*inside[: len(inside) - node.level + 1], *([base] if base else [])])
    for alias in node.names:
        full = f"{base}.{alias.name}"
        if alias.name != "__version__":
            yield full if full in modules else base


def row_of(module: str, rows: tuple[tuple[str, ...], ...]) -> tuple[int, str]:
    """The module's row, counted from 1 (0: named in none), and the name that put it there."""
    best = (0, module)
    for number, row in enumerate(rows, 1):
        for name in row:
            # The package's own name stands for its __init__ only.
            matches = is_within(module, name) if "." in name else module == name
            if matches and (best[0] == 0 or len(name) > len(best[1])):
                best = (number, name)
    return best


def upward(imports: list[Import], rows: tuple[tuple[str, ...], ...]) -> list[str]:
    wrong = []
    for one in imports:
        row, name = row_of(one.importer, rows)
        imported_row, imported_name = row_of(one.imported, rows)
        if row == 0 or imported_row == 0:
            continue  # `unlisted` reports it
        if imported_row > row:
            wrong.append(f"{one}, which is above it: row {imported_row} ({imported_name}) against row {row} ({name})")
        elif row == imported_row and name != imported_name:
            wrong.append(f"{one}, which is beside it: row {row} holds {name} and {imported_name} apart")
    return wrong


def unlisted(modules: Iterable[str], rows: tuple[tuple[str, ...], ...]) -> list[str]:
    return [module for module in modules if row_of(module, rows)[0] == 0]


def together(imports: list[Import]) -> list[str]:
    return [
        f"{one}, and {importer} and {imported} are kept apart"
        for one in imports
        for importer, imported in APART
        if is_within(one.importer, importer) and is_within(one.imported, imported)
    ]


def trespasses(imports: list[Import]) -> list[str]:
    wrong = []
    for one in imports:
        top = one.imported.partition(".")[0]
        owners = OWNERS.get(top)
        if owners and not any(is_within(one.importer, owner) for owner in owners):
            wrong.append(f"{one}, which is for {' and '.join(owners)} only")
    return wrong


def concrete_backends(imports: list[Import]) -> list[str]:
    """The imports of a backend by the daemon or an engine that are not in BACKEND_IMPORTERS."""
    wrong = []
    for one in imports:
        drives = is_within(one.importer, "vfsd.daemon") or is_within(one.importer, "vfsd.kernel")
        owners = [names for owner, names in BACKEND_IMPORTERS.items() if is_within(one.importer, owner)]
        is_allowed = any(is_within(one.imported, name) for names in owners for name in names)
        if drives and is_within(one.imported, "protocol.backends") and not is_allowed:
            wrong.append(f"{one}, which is for the registry of backends only")
    return wrong


def cycle(imports: list[Import]) -> list[str]:
    """The modules of one cycle at import time, the first again as the last; empty where there is none."""
    graph: dict[str, set[str]] = {}
    for one in imports:
        if one.is_deferred:
            continue
        graph.setdefault(one.importer, set()).add(one.imported)
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph.get(module, ())):
            found = visit(target, [*path, module])
            if found:
                return found
        done.add(module)
        return []

    for module in sorted(graph):
        found = visit(module, [])
        if found:
            return found
    return []


ADVICE = "\n\nMove what is needed down, or pass it in; where the module's place is new, name it in LAYERS of this test."


@pytest.mark.parametrize("package", ["protocol", "vfsd"])
def test_inside_a_package_imports_point_downward(package: str) -> None:
    inside = [one for one in imports_of_repository() if is_within(one.importer, package)]
    inside = [one for one in inside if is_within(one.imported, package)]
    wrong = upward(inside, LAYERS[package])
    assert not wrong, "\n".join(wrong) + ADVICE


@pytest.mark.parametrize("package", ["protocol", "vfsd"])
def test_every_module_has_a_row(package: str) -> None:
    missing = unlisted(module_names(REPOSITORY, package), LAYERS[package])
    assert not missing, "\n".join(missing) + ADVICE


@pytest.mark.parametrize("package", ["protocol", "vfsd"])
def test_every_row_names_modules_that_exist(package: str) -> None:
    modules = module_names(REPOSITORY, package)
    assert [name for row in LAYERS[package] for name in row if name not in modules] == []


def test_the_root_of_vfsd_holds_no_module() -> None:
    assert [path.name for path in (REPOSITORY / "vfsd").glob("*.py")] == ["__init__.py"]


def test_the_client_and_the_daemon_do_not_import_each_other() -> None:
    wrong = together(imports_of_repository())
    assert not wrong, "\n".join(wrong) + ADVICE


def test_only_the_registry_of_backends_imports_a_concrete_backend() -> None:
    wrong = concrete_backends(imports_of_repository())
    assert not wrong, "\n".join(wrong) + "\n\nUse `volume.capabilities` and protocol.volume_extensions."


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = cycle(imports_of_repository())
    assert not found, " -> ".join(found) + ADVICE


def test_protocol_knows_neither_fuse_nor_the_command_line_nor_vfsd() -> None:
    wrong = trespasses(imports_of_repository())
    assert not wrong, "\n".join(wrong) + ADVICE


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A repository that breaks every rule once."""
    files = {
        "protocol/__init__.py": "",
        "protocol/errors.py": "from .tree import Tree",
        "protocol/tree.py": "import os\nfrom protocol import diff",
        "protocol/diff.py": "from protocol.streams import chunks\ndef f():\n    import trio.lowlevel",
        "protocol/streams.py": "from protocol import __version__",
        "protocol/loose.py": "from protocol import tree",
        "protocol/backends/__init__.py": "",
        "protocol/backends/memory.py": "from ..diff import changes\nimport protocol.tree\nimport vfsd.wire.options",
        "protocol/backends/container/__init__.py": "import trio",
        "vfsd/__init__.py": "",
        "vfsd/wire/options.py": "from vfsd.wire import lines\nimport click",
        "vfsd/wire/lines.py": "from vfsd.wire.options import x",
        "vfsd/machine/logs.py": "if TYPE_CHECKING:\n    from vfsd.client.launch import Launch",
        "vfsd/client/launch.py": "from vfsd.machine import logs\nimport vfsd\nprint(vfsd.__version__, vfsd.__file__)",
        "vfsd/daemon/backends.py": "from protocol.backends import memory",
        "vfsd/kernel/engines/native.py": "def f():\n    from protocol.backends.memory import MemoryVolume",
        "vfsd/daemon/main.py": "import vfsd\nfrom vfsd.client import launch\nprint(vfsd.__version__, vfsd.Workspace)",
    }
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    return tmp_path


def test_an_upward_and_a_sideways_import_are_reported_with_their_place(sources: Path) -> None:
    wrong = upward(imports_of(sources, "protocol"), LAYERS["protocol"])

    assert [line.split(", which")[0] for line in wrong] == [
        "protocol/diff.py:1: protocol.diff imports protocol.streams",
        "protocol/errors.py:1: protocol.errors imports protocol.tree",
        "protocol/tree.py:2: protocol.tree imports protocol.diff",
    ]


def test_a_module_without_a_row_is_reported(sources: Path) -> None:
    assert unlisted(module_names(sources, "protocol"), LAYERS["protocol"]) == ["protocol.loose"]


def test_an_import_for_the_type_checker_points_downward_too(sources: Path) -> None:
    wrong = upward(imports_of(sources, "vfsd"), LAYERS["vfsd"])

    assert "vfsd/machine/logs.py:2: vfsd.machine.logs imports vfsd.client.launch" in [
        line.split(", which")[0] for line in wrong
    ]


def test_of_its_own_package_a_module_may_use_version_and_path_only(sources: Path) -> None:
    wrong = [line.split(", which")[0] for line in upward(imports_of(sources, "vfsd"), LAYERS["vfsd"])]

    assert "vfsd/daemon/main.py:1: vfsd.daemon.main imports vfsd" in wrong
    assert not any("vfsd.client.launch imports vfsd" in line for line in wrong)


def test_a_daemon_that_imports_the_client_is_reported(sources: Path) -> None:
    assert [line.split(", and")[0] for line in together(imports_of(sources, "vfsd"))] == [
        "vfsd/daemon/main.py:2: vfsd.daemon.main imports vfsd.client.launch"
    ]


def test_an_engine_that_imports_a_backend_is_reported(sources: Path) -> None:
    assert [line.split(", which")[0] for line in concrete_backends(imports_of(sources, "protocol", "vfsd"))] == [
        "vfsd/kernel/engines/native.py:2: vfsd.kernel.engines.native imports protocol.backends.memory"
    ]


def test_a_circle_at_import_time_is_reported(sources: Path) -> None:
    assert cycle(imports_of(sources, "vfsd")) == ["vfsd.wire.lines", "vfsd.wire.options", "vfsd.wire.lines"]


def test_a_distribution_in_the_wrong_place_is_reported(sources: Path) -> None:
    wrong = trespasses(imports_of(sources, "protocol", "vfsd"))

    assert [line.split(", which")[0] for line in wrong] == [
        "protocol/backends/memory.py:3: protocol.backends.memory imports vfsd.wire.options",
        "protocol/diff.py:3: protocol.diff imports trio.lowlevel",
        "vfsd/wire/options.py:2: vfsd.wire.options imports click",
    ]
