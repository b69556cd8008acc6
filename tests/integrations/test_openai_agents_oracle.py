"""OpenAI Agents SDK: a session of a workspace answers as the SDK's own UnixLocalSandboxSession does."""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents")

from agents import ApplyPatchOperation
from agents.sandbox import Manifest, SandboxPathGrant
from agents.sandbox.entries import Dir, File
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient, UnixLocalSandboxClientOptions
from agents.sandbox.session import BaseSandboxClient, SandboxSession

from vfsd.integrations.openai_agents import VfsdSandboxClient, VfsdSandboxClientOptions

Step = Callable[[SandboxSession, Path], Awaitable[Any]]


def entries_of(manifest_of: Path, granted: Path) -> Manifest:
    return Manifest(
        root=str(manifest_of),
        entries={
            "a.txt": File(content=b"a\n"),
            "d": Dir(children={"b.txt": File(content=b"b\n"), "temporary": File(content=b"t", ephemeral=True)}),
        },
        environment={"value": {"COLOUR": "blue"}},
        extra_path_grants=(SandboxPathGrant(path=str(granted), read_only=True),),
    )


async def content(session: SandboxSession, path: str | Path) -> bytes:
    with await session.read(Path(path)) as stream:
        return stream.read()


def stream(data: bytes) -> io.BytesIO:
    return io.BytesIO(data)


async def listed(session: SandboxSession, path: str) -> list[Any]:
    found = await session.ls(path)
    return sorted((e.path, e.kind.value, e.owner, e.size if e.kind.value == "file" else 0) for e in found)


async def archived(session: SandboxSession) -> list[Any]:
    with await session.persist_workspace() as archive, tarfile.open(fileobj=archive) as tar:
        return sorted((m.name, m.type, oct(m.mode), m.linkname, _text(tar, m)) for m in tar.getmembers())


def _text(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member) if member.isreg() else None
    return file.read() if file is not None else b""


async def replaced(session: SandboxSession) -> Any:
    with await session.persist_workspace() as archive:
        await session.write(Path("later"), stream(b"later"))
        await session.write(Path("a.txt"), stream(b"changed"))
        await session.hydrate_workspace(archive)
    return await content(session, "a.txt"), await content(session, "later")


def bad_archive(name: str, kind: bytes = tarfile.REGTYPE) -> io.BytesIO:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "a.txt"
        tar.addfile(member)
    made.seek(0)
    return made


async def patched(session: SandboxSession) -> Any:
    return await session.apply_patch(
        [
            ApplyPatchOperation(type="update_file", path="a.txt", diff="@@\n-a\n+A\n"),
            ApplyPatchOperation(type="create_file", path="new/c.txt", diff="+c\n"),
            ApplyPatchOperation(type="delete_file", path="d/b.txt"),
            ApplyPatchOperation(type="update_file", path="new/c.txt", diff="@@\n-c\n+C\n", move_to="new/d.txt"),
        ]
    )


async def ran(session: SandboxSession, line: str, **arguments: Any) -> Any:
    done = await session.exec(line, **arguments)
    return done.exit_code, done.stdout, done.stderr


async def talked(session: SandboxSession) -> Any:
    started = await session.pty_exec_start("printf 'name? '; read name; echo hello $name", tty=True, yield_time_s=0.3)
    assert started.process_id is not None
    answers = [started.output, started.exit_code]
    update = await session.pty_write_stdin(session_id=started.process_id, chars="you\n", yield_time_s=2)
    while update.exit_code is None:
        answers.append(update.output)
        update = await session.pty_write_stdin(session_id=started.process_id, chars="", yield_time_s=5)
    return b"".join(each for each in [*answers, update.output] if isinstance(each, bytes)), update.exit_code


async def in_background(session: SandboxSession) -> Any:
    update = await session.pty_exec_start("echo first; sleep 1; echo second >&2; exit 7", yield_time_s=10)
    return update.process_id, update.output, update.exit_code


async def ends_with_the_session(session: SandboxSession) -> Any:
    update = await session.pty_exec_start("echo $$; exec sleep 600", yield_time_s=0.5)
    await session.pty_terminate_all()
    for _ in range(100):
        if not os.path.exists(f"/proc/{int(update.output)}"):
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("the command runs on")
    await session.pty_write_stdin(session_id=update.process_id or 0, chars="x")


# Each step in the order of the list, in one session.  `granted` is a directory outside, which the manifest grants.
STEPS: dict[str, Step] = {
    "the manifest is there": lambda s, _: listed(s, "."),
    "a nested entry": lambda s, _: content(s, "d/b.txt"),
    "an absolute path": lambda s, _: content(s, f"{s.state.manifest.root}/a.txt"),
    "a missing file": lambda s, _: content(s, "none"),
    "a directory is not read": lambda s, _: content(s, "d"),
    "outside, relative": lambda s, _: content(s, "../x"),
    "outside, absolute": lambda s, _: content(s, "/etc/passwd"),
    "a grant is read": lambda s, granted: content(s, granted / "given"),
    "a read-only grant is not written": lambda s, granted: s.write(granted / "new", stream(b"x")),
    "a bounded read": lambda s, _: s.read_bounded(Path("a.txt"), max_bytes=1),
    "write makes directories": lambda s, _: s.write(Path("x/y/z"), stream(b"z" * 100_000)),
    "what was written": lambda s, _: content(s, "x/y/z"),
    "write over a directory": lambda s, _: s.write(Path("x"), stream(b"")),
    "write below a file": lambda s, _: s.write(Path("a.txt/b"), stream(b"")),
    "write text": lambda s, _: s.write(Path("t"), io.StringIO("text")),
    # UnixLocalSandboxSession leaves an empty file: a workspace's write is complete, or does not happen.
    "what it left": lambda s, _: s.rm("t", recursive=True),
    "mkdir": lambda s, _: s.mkdir("m"),
    "mkdir again": lambda s, _: s.mkdir("m"),
    "mkdir without parents": lambda s, _: s.mkdir("n/o"),
    "mkdir with parents": lambda s, _: s.mkdir("n/o/p", parents=True),
    "mkdir over a file": lambda s, _: s.mkdir("a.txt"),
    "ls of a file": lambda s, _: listed(s, "a.txt"),
    "ls of nothing": lambda s, _: listed(s, "none"),
    "ls": lambda s, _: listed(s, "n"),
    "rm of nothing": lambda s, _: s.rm("none"),
    "rm -r of nothing": lambda s, _: s.rm("none", recursive=True),
    "rm of a full directory": lambda s, _: s.rm("n"),
    "rm -r": lambda s, _: s.rm("n", recursive=True),
    "it is gone": lambda s, _: listed(s, "n"),
    "mv": lambda s, _: s.mv("x/y/z", "x/w"),
    "mv of a directory": lambda s, _: s.mv("x", "v"),
    "mv over a directory": lambda s, _: s.mv("x/w", "m"),
    "mv of nothing": lambda s, _: s.mv("none", "v"),
    "same file": lambda s, _: s.same_file("a.txt", "d/../a.txt"),
    "other file": lambda s, _: s.same_file("a.txt", "d/b.txt"),
    "no file": lambda s, _: s.same_file("a.txt", "none"),
    "links": lambda s, _: ran(s, "ln -s a.txt l; ln -s /etc out; ln -s nowhere dangling; ln a.txt hard; mkfifo fifo"),
    "a link is read": lambda s, _: content(s, "l"),
    "no link leads outside": lambda s, _: content(s, "out/passwd"),
    "nothing is written outside": lambda s, _: s.write(Path("out/vfsd-test"), stream(b"x")),
    "a fifo is not read": lambda s, _: content(s, "fifo"),
    "hard links are one file": lambda s, _: s.same_file("a.txt", "hard"),
    "kinds": lambda s, _: listed(s, "."),
    "links go": lambda s, _: ran(s, "rm l out dangling hard fifo"),
    "a command": lambda s, _: ran(s, "echo out; echo err >&2; exit 3"),
    "its words": lambda s, _: ran(s, "printf", shell=False),
    "its environment": lambda s, _: ran(s, 'echo "$COLOUR"; test "$HOME" = "$PWD"; echo $?; pwd'),
    "a signal": lambda s, _: ran(s, "kill -9 $$"),
    "large output": lambda s, _: ran(s, "head -c 3000000 /dev/zero"),
    "empty input": lambda s, _: ran(s, "cat"),
    "no such program": lambda s, _: ran(s, "no-such-program", shell=False),
    "a time limit": lambda s, _: ran(s, "sleep 100", timeout=0.2),
    "apply_patch": lambda s, _: patched(s),
    "what it wrote": lambda s, _: listed(s, "new"),
    "apply_patch outside": lambda s, _: s.apply_patch(
        ApplyPatchOperation(type="create_file", path="../x", diff="+x\n")
    ),
    "apply_patch over a file": lambda s, _: s.apply_patch(
        ApplyPatchOperation(type="create_file", path="a.txt", diff="+x\n")
    ),
    "a terminal": lambda s, _: talked(s),
    "without a terminal": lambda s, _: in_background(s),
    "a command that runs on": lambda s, _: ends_with_the_session(s),
    "an executable": lambda s, _: ran(
        s, "printf '#!/bin/sh\\necho run' > run; chmod 755 run; mkfifo fifo; ln -s run r"
    ),
    "the archive": lambda s, _: archived(s),
    "hydrate adds and replaces": lambda s, _: replaced(s),
    "it kept the mode": lambda s, _: ran(s, "./run && ./r"),
    "a hostile archive": lambda s, _: s.hydrate_workspace(bad_archive("../x")),
    "an archive with a hard link": lambda s, _: s.hydrate_workspace(bad_archive("h", tarfile.LNKTYPE)),
    "no archive": lambda s, _: s.hydrate_workspace(stream(b"no archive")),
    "extract": lambda s, _: s.extract("in/bundle.tar", bad_archive("member")),
    "what was extracted": lambda s, _: listed(s, "in"),
    "a port": lambda s, _: s.resolve_exposed_port(8000),
    "another port": lambda s, _: s.resolve_exposed_port(8001),
    "running": lambda s, _: s.running(),
}


async def answers(client: BaseSandboxClient[Any], manifest: Manifest, options: Any, granted: Path) -> dict[str, Any]:
    """Run all steps in one session; an error is an answer: its type, and the SDK's code."""
    session = await client.create(manifest=manifest, options=options)
    root = session.state.manifest.root
    found: dict[str, Any] = {"running before": await session.running()}
    await session.start()
    try:
        for name, step in STEPS.items():
            try:
                outcome = step(session, granted)
                answer = await outcome if inspect.isawaitable(outcome) else outcome
            except Exception as error:
                answer = (type(error).__name__, str(getattr(error, "error_code", "")))
            found[name] = _without(answer, root)
    finally:
        await session.stop()
        await session.shutdown()
        found["running after"] = await session.running()
        await client.delete(session)
    return found


def _without(answer: Any, root: str) -> Any:
    """The answer without the path of the workspace and the numbers of processes."""
    if isinstance(answer, str):
        return answer.replace(root, "ROOT")
    if isinstance(answer, bytes):
        return answer.replace(root.encode(), b"ROOT")
    if isinstance(answer, list | tuple):
        return [_without(each, root) for each in answer]
    return answer


def test_the_same_calls_give_the_same_answers(workdir: Path) -> None:
    granted = workdir / "granted"
    granted.mkdir()
    (granted / "given").write_text("given\n")

    async def both() -> tuple[dict[str, Any], dict[str, Any]]:
        local = await answers(
            UnixLocalSandboxClient(),
            entries_of(workdir / "local", granted),
            UnixLocalSandboxClientOptions(exposed_ports=(8000,)),
            granted,
        )
        ours = await answers(
            VfsdSandboxClient(),
            entries_of(workdir / "vfsd", granted),
            VfsdSandboxClientOptions(exec_on_host=True, exposed_ports=(8000,)),
            granted,
        )
        return local, ours

    local, ours = asyncio.run(both())
    different = {name: (local[name], ours[name]) for name in local if local[name] != ours[name]}
    assert different == {}
    assert os.listdir(granted) == ["given"]
