"""A campaign of mutants: small changes of the product, and whether the tests notice them.

    alias mutants='python -m tests.support.mutants'
    mutants choose            write the campaign: COUNT mutants spread evenly over the folders, from SEED
    mutants map               which test modules reach which lines, from what `make coverage SUITE=all` measured
    mutants run               try each mutant that has no result yet, on the tests that reach its line
    mutants run --whole 30    the same for the first 30, on all tests
    mutants report            how many were caught, and by which suite

The campaign and its results are `tests/mutants.json`; `run` writes it after each mutant, so it can be stopped and
started again.  It changes the checkout that it runs in and puts it back: use a clone of its own.  A mutant that the
short suite does not catch goes to the tests that only `make test-all` runs.  One whose tests run into the time limit is
not counted: it may hang, or the machine may be slow.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import itertools
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEED = 30
COUNT = 120
LIMIT_S = 1500
CAMPAIGN = Path("tests/mutants.json")
REACHED = Path(".mutants-map.json")
_COMPARISONS = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


def _changed(node: ast.AST) -> ast.AST | None:
    """The node as a mutant has it; None if this kind of node is left alone."""
    new: Any = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[operator]):
            new.ops = [_COMPARISONS[type(operator)]()]
        case ast.BoolOp(op=operator):
            new.op = ast.Or() if isinstance(operator, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.BinOp(op=ast.Add() | ast.Sub() as operator):
            new.op = ast.Sub() if isinstance(operator, ast.Add) else ast.Add()
        case ast.Constant(value=bool() as value):
            new.value = not value
        case ast.Constant(value=int() as value):
            new.value = value + 1
        case ast.Expr(value=ast.Call() | ast.Await()):
            return ast.Pass()
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            new.value = ast.Constant(None)
        case ast.Break():
            return ast.Continue()
        case ast.Continue():
            return ast.Break()
        case _:
            return None
    return new


def _sites(tree: ast.AST) -> Iterator[ast.AST]:
    """What can be changed inside of functions: no declarations, annotations, or assertions."""

    def walk(node: ast.AST, inside: bool) -> Iterator[ast.AST]:
        if isinstance(node, ast.Assert | ast.JoinedStr | ast.arg):
            return
        if inside and _changed(node) is not None:
            yield node
        body = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name, value in ast.iter_fields(node):
            if name in {"annotation", "returns", "decorator_list", "type_params", "bases"}:
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, body)

    return walk(tree, False)


def choose() -> None:
    """Write the campaign: in turn from each folder, a module of it by its size, and a place in it."""
    chance = random.Random(SEED)
    folders: dict[Path, list[Path]] = {}
    for root in ("protocol", "vfsd"):
        for module in sorted(Path(root).rglob("*.py")):
            if not module.is_relative_to("protocol/testing") and module.name != "__init__.py":
                folders.setdefault(module.parent, []).append(module)
    mutants: list[dict[str, Any]] = []
    names = sorted(folders)
    chance.shuffle(names)
    seen: set[tuple[str, int, int]] = set()
    for folder in itertools.cycle(names):
        if len(mutants) == COUNT:
            break
        modules = folders[folder]
        module = chance.choices(modules, [each.stat().st_size for each in modules])[0]
        sites = list(_sites(ast.parse(module.read_bytes())))
        if not sites:
            continue
        node: Any = chance.choice(sites)
        place = (str(module), node.lineno, node.col_offset)
        if place in seen:
            continue
        seen.add(place)
        new = ast.unparse(_changed(node) or node)
        old = ast.get_source_segment(module.read_text(), node) or ""
        statement = isinstance(node, ast.stmt)
        line = module.read_text().splitlines()[node.lineno - 1].strip()
        mutants.append(
            {
                "file": str(module),
                "line": node.lineno,
                "column": node.col_offset,
                "text": line,
                "old": old,
                "new": new if statement else f"({new})",
            }
        )
    _write(mutants)
    print(f"{len(mutants)} mutants of {len({each['file'] for each in mutants})} modules")


def _write(mutants: list[dict[str, Any]]) -> None:
    CAMPAIGN.write_text(json.dumps(mutants, indent=1) + "\n")


def reached() -> None:
    """Write which test modules reach which lines, from coverage's data (their context is the test module)."""
    from coverage import CoverageData

    data = CoverageData()
    data.read()
    lines: dict[str, dict[int, list[str]]] = {}
    here = Path.cwd()
    for name in data.measured_files():
        with contextlib.suppress(ValueError):
            path = str(Path(name).relative_to(here))
            lines[path] = {
                line: sorted({part for each in contexts for part in each.split("|") if part.startswith("tests/")})
                for line, contexts in data.contexts_by_lineno(name).items()
            }
    REACHED.write_text(json.dumps(lines))


@contextlib.contextmanager
def _applied(mutant: dict[str, Any]) -> Iterator[bool]:
    """The checkout with the mutant in it; False if its line is there no more."""
    path = Path(mutant["file"])
    before = path.read_bytes() if path.exists() else b""
    lines = before.decode().splitlines(keepends=True)
    # The nearest line with the same text: the campaign outlives changes elsewhere in the module.
    same = [number for number, line in enumerate(lines, 1) if line.strip() == mutant["text"]]
    at = min(same, key=lambda number: abs(number - mutant["line"]), default=0)
    start = sum(len(line.encode()) for line in lines[: at - 1]) + mutant["column"]
    old = mutant["old"].encode()
    if not at or before[start : start + len(old)] != old:
        yield False
        return
    try:
        path.write_bytes(before[:start] + mutant["new"].encode() + before[start + len(old) :])
        yield True
    finally:
        path.write_bytes(before)


def _tested(suite: str, modules: list[str], workers: int) -> str:
    """ "passed", "timed out", or the first test that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", str(workers), "--suite", suite]
    command += ["--dist", "worksteal", "-p", "no:cacheprovider", *modules]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
            process.kill()
            return "timed out"
        except BaseException:  # Ctrl-C, SIGTERM
            process.send_signal(signal.SIGINT)
            raise
    if process.returncode in (0, 5):  # 5: the suite has none of these tests
        return "passed"
    named = [line.split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return named[0] if named else f"pytest ended with {process.returncode}"


def run(whole: int, workers: int) -> None:
    """Try the mutants that have no result yet."""
    lines = {} if whole else json.loads(REACHED.read_text())
    mutants = json.loads(CAMPAIGN.read_text())
    key = "whole" if whole else "result"
    for number, mutant in enumerate(mutants[:whole] if whole else mutants):
        if key in mutant:
            continue
        modules = lines.get(mutant["file"], {}).get(str(mutant["line"]), [])
        began = time.monotonic()
        with _applied(mutant) as there:
            if not there:
                mutant[key] = {"gone": True}
            elif not whole and not modules:
                mutant[key] = {"reached": 0, "short": "passed", "rest": "passed"}
            else:
                found = {"reached": len(modules), "short": _tested("short", modules, workers)}
                if found["short"] == "passed":
                    found["rest"] = _tested("rest", modules, workers)
                mutant[key] = found
        mutant[key]["seconds"] = round(time.monotonic() - began)
        _write(mutants)
        print(number, mutant["file"], mutant["line"], mutant[key], flush=True)


def report() -> None:
    """Print the counts, and the mutants that no test caught."""
    mutants = json.loads(CAMPAIGN.read_text())
    for key in ("result", "whole"):
        counts: Counter[str] = Counter()
        for mutant in mutants:
            result = mutant.get(key)
            if result is None or result.get("gone"):
                continue
            ends = [result["short"], result.get("rest", "")]
            kind = "timed out" if "timed out" in ends else "survived"
            if ends[0] not in ("passed", "timed out"):
                kind = "caught by the short suite"
            elif ends[0] == "passed" and ends[1] not in ("passed", "timed out"):
                kind = "caught by the others"
            counts[kind] += 1
            if key == "result" and kind == "survived":
                print(f"survived: {mutant['file']}:{mutant['line']}: {mutant['old']!r} -> {mutant['new']!r}")
        print(f"{key}: {dict(counts)}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["choose", "map", "run", "report"])
    parser.add_argument("--whole", type=int, default=0, metavar="N", help="the first N, on all tests")
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C: the checkout is put back
    match options.command:
        case "choose":
            choose()
        case "map":
            reached()
        case "run":
            run(options.whole, options.workers)
        case _:
            report()


if __name__ == "__main__":
    main()
