"""`AsyncWorkspace` on real mounts, on asyncio and on trio."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import pytest

from protocol.types import FilesystemSnapshot
from tests.mount.conftest import mounted
from tests.support.seeds import campaign_seed
from vfsd import AsyncWorkspace
from vfsd.wire.messages import Exchange

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_calls.py"
Run: TypeAlias = "functools.partial[Any]"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def command_started(file: Path) -> int:
    """Wait until the command has written its process id to `file`; return that."""
    with anyio.fail_after(60):
        while not (file.exists() and file.read_text().endswith("\n")):
            await anyio.sleep(0.01)
    return int(file.read_text())


COMMAND = ["sh", "-c", "sleep 1000 & echo $! >pid; wait"]


@pytest.mark.extended
def test_large_output_arrives_in_messages_that_do_not_stop_the_loop(
    workdir: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    take = Exchange.take

    def taking(self: Exchange, line: bytes) -> object:
        sizes.append(len(line))
        return take(self, line)

    monkeypatch.setattr(Exchange, "take", taking)

    async def body() -> None:
        async with AsyncWorkspace.mount(workdir / "m", name=workdir.name, exec_on_host=True) as ws:
            for out, err in ((16 << 20, 16 << 20), (3_000_000, 0), (0, 3_000_000), (10, 10), (0, 0)):
                line = f"head -c {out} /dev/zero; head -c {err} /dev/zero | tr '\\0' e >&2"
                done = await ws.async_executor.run(["sh", "-c", line], output_limit_bytes=16 << 20)
                assert (done.exit_status, done.truncated) == (0, False)
                assert (done.stdout, done.stderr) == (bytes(out), b"e" * err)
            done = await ws.async_executor.run(["head", "-c", "9000000", "/dev/zero"], output_limit_bytes=5_000_000)
            assert (len(done.stdout), done.truncated) == (5_000_000, True)

    run(body)
    assert max(sizes) < 512 << 10


def test_the_calls_of_a_session(workdir: Path, run: Run) -> None:
    async def body() -> None:
        async with AsyncWorkspace.mount(workdir / "m", name=workdir.name, exec_on_host=True) as ws:
            files = ws.async_filesystem
            await files.write("a.txt", "one\n")
            taken = await files.snapshot(tag="before")
            done = await ws.async_executor.run(["sh", "-c", "cat; echo two >>a.txt"], stdin=b"input")
            assert (done.exit_status, done.stdout) == (0, b"input")
            assert (await ws.diff(taken.commit_ref)).counts.modified == 1
            await files.restore(taken)
            assert Path(ws.path, "a.txt").read_text() == "one\n"
            assert ws.filesystem.read("a.txt").content == "one\n"
            with pytest.raises(FileNotFoundError, match="no-such-program"):
                await ws.async_executor.run(["no-such-program"])
        assert not os.path.ismount(workdir / "m")

    run(body)


def test_a_cancelled_command_is_killed_when_the_call_ends(workdir: Path, run: Run) -> None:
    async def body() -> None:
        ws = await AsyncWorkspace.attach(workdir.name)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ws.async_executor.run, COMMAND)
            pid = await command_started(Path(ws.path, "pid"))
            tasks.cancel_scope.cancel()
        assert not is_alive(pid)
        assert ws.last_cancelled is not None
        assert ws.last_cancelled.outcome == "stopped"

    with mounted(workdir / "m", name=workdir.name, exec_on_host=True):
        run(body)


def test_a_command_that_times_out_in_asyncio_is_killed(workdir: Path) -> None:
    async def body() -> None:
        ws = await AsyncWorkspace.attach(workdir.name)
        pid = asyncio.ensure_future(command_started(Path(ws.path, "pid")))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await ws.async_executor.run(COMMAND)
        assert not is_alive(await pid)

    with mounted(workdir / "m", name=workdir.name, exec_on_host=True):
        asyncio.run(body())


def test_calls_run_in_parallel(workdir: Path, run: Run) -> None:
    async def body() -> None:
        ws = await AsyncWorkspace.attach(workdir.name)
        files = ws.async_filesystem

        async def one(number: int) -> None:
            await files.write(f"d/{number}", str(number))
            await ws.snapshot(f"s-{number}")
            assert (await files.read(f"d/{number}")).content == str(number)
            await ws.status()

        async with anyio.create_task_group() as tasks:
            for number in range(60):
                tasks.start_soon(one, number)
        assert len(await ws.snapshots(changes=False)) == 60
        assert len(await files.list("d")) == 60

    with mounted(workdir / "m", name=workdir.name):
        run(body)


@pytest.mark.extended
def test_a_host_restore_that_is_cancelled_is_done_or_not_done(workdir: Path, run: Run) -> None:
    """At whatever moment: the state is one of the two, and `last_cancelled` says which."""
    below = workdir / "below"
    below.mkdir()

    async def body() -> None:
        ws = await AsyncWorkspace.attach(workdir.name)
        for number in range(200):
            (below / f"f{number}").write_text("one")
        await ws.snapshot("one")
        for delay_s in (0.0, 0.02, 0.1, 0.3):
            for number in range(200):
                (below / f"f{number}").write_text(f"two {delay_s}")
            with anyio.move_on_after(delay_s) as scope:
                await ws.restore("one")
            found = {(below / f"f{number}").read_text() for number in range(200)}
            if not scope.cancelled_caught:
                assert found == {"one"}
                continue
            outcome = "stopped" if ws.last_cancelled is None else ws.last_cancelled.outcome
            assert (outcome, found) in [("stopped", {f"two {delay_s}"}), ("completed", {"one"})]

    with mounted(workdir / "m", backend=f"host:{below}", name=workdir.name, store=workdir / "store"):
        run(body)


def test_the_example_of_tool_calls_undoes_the_one_that_fails() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=120, check=True)

    assert done.stdout.splitlines() == [
        "call-1: ''",
        "call-2: exit status 1, undone: ['result', 'src', 'src/main.py']",
        "call-3: 'print(1)\\n'",
    ]
    assert done.stderr == ""


class Campaign:
    """Random calls, each cancelled at a random moment."""

    def __init__(self, ws: AsyncWorkspace, base: FilesystemSnapshot, chance: random.Random, *, native: bool) -> None:
        self._ws = ws
        self._files = ws.async_filesystem
        self._base = base
        self._chance = chance
        self._native = native  # asyncio's own cancellation, too

    async def step(self) -> None:
        call = self._chance.choice(
            [self._write, self._restore, self._run, self._transaction, self._export, self._stream]
        )
        after_s = self._chance.random() ** 3 * 0.2
        # anyio's cancellation is repeated at each await until the scope ends; asyncio's is delivered once.
        is_native = self._native and self._chance.random() < 0.5
        with contextlib.suppress(TimeoutError, ZeroDivisionError):
            if is_native:
                async with asyncio.timeout(after_s):
                    await call()
            else:
                with anyio.fail_after(after_s):
                    await call()
        self._ws._transactions.check_invariants()

    async def _write(self) -> None:
        await self._files.write(f"d/{self._chance.randrange(10)}", "x" * 100_000)

    async def _restore(self) -> None:
        await self._files.restore(self._base)

    async def _run(self) -> None:
        await self._ws.async_executor.run(COMMAND)

    async def _transaction(self) -> None:
        async with self._ws.transaction("outer"):
            await self._files.write("file", "outer")
            with contextlib.suppress(ZeroDivisionError):
                async with self._ws.transaction("inner"):
                    await self._files.write("file", "inner")
                    raise ZeroDivisionError
            assert (await self._files.read("file")).content == "outer"
            raise ZeroDivisionError

    async def _export(self) -> None:
        target = f"{self._ws.path}-{self._chance.randrange(10)}.zip"
        await self._ws.export(target, overwrite=True)

    async def _stream(self) -> None:
        async with await self._files.open_write("streamed") as writer:
            for _ in range(5):
                await writer.write(b"x" * 50_000)


def test_any_call_may_be_cancelled_at_any_moment(workdir: Path, run: Run, runs_long: bool) -> None:
    """Nothing is left of a cancelled call: no snapshot, temporary file, process or file descriptor."""
    seed = campaign_seed()

    async def body() -> None:
        ws = await AsyncWorkspace.attach(workdir.name)
        base = await ws.async_filesystem.snapshot()
        campaign = Campaign(ws, base, random.Random(seed), native=run.keywords["backend"] == "asyncio")
        await campaign.step()
        open_files = len(os.listdir("/proc/self/fd"))
        for _ in range(1_000 if runs_long else 25):
            await campaign.step()
        assert [each.name for each in await ws.snapshots(changes=False) if each.kind == "user"] == [base.commit_ref]
        assert [path for path in Path(ws.path).rglob("*") if path.name.endswith(".tmp")] == []
        assert len(os.listdir("/proc/self/fd")) <= open_files + 5
        with contextlib.suppress(FileNotFoundError, ValueError):
            assert not is_alive(int(Path(ws.path, "pid").read_text()))

    with mounted(workdir / "m", name=workdir.name, exec_on_host=True):
        try:
            run(body)
        except BaseException as error:
            error.add_note(f"the seed is {seed}")
            raise


def test_ctrl_c_of_a_program_undoes_its_transaction_and_unmounts(workdir: Path) -> None:
    code = """
import asyncio, sys
from vfsd import AsyncWorkspace
async def main():
    async with AsyncWorkspace.mount(sys.argv[1], name=sys.argv[2]) as ws:
        try:
            async with ws.transaction() as t:
                await ws.async_filesystem.write("file", "x")
                print("written", flush=True)
                await asyncio.sleep(60)
        finally:
            print(t.state, (await ws.async_filesystem.exists("file")), flush=True)
asyncio.run(main())
"""
    command = [sys.executable, "-c", code, workdir / "m", workdir.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "written\n"
        program.send_signal(signal.SIGINT)
        output, errors = program.communicate(timeout=60)
    assert output == "restored False\n"
    assert errors.endswith("KeyboardInterrupt\n")
    assert not os.path.ismount(workdir / "m")
