"""VfsdSandboxSession: a workspace as `BaseSandboxSession` of the OpenAI Agents SDK.

Files are read and written through the mount.  Commands run where the workspace runs them: on this host or in a
container.  Paths are those that commands see: the mountpoint on this host, /workspace in a sandbox.

A state is saved by a snapshot of the workspace.  With `VfsdSnapshot` that is all; for the SDK's other kinds of snapshot
it is read from there, so that it is one state, whatever programs write meanwhile.  That snapshot also tells at the next
start whether the workspace has changed since.  What replaces the files is one step: it is complete, or undone.

`Terminals` are the commands that go on between the calls of the agent, with or without a terminal.  They implement
`pty_exec_start` and `pty_write_stdin` with the SDK's own rules for waiting, numbers and truncation.

Threading: one asyncio loop.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    PtySessionNotFoundError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceStartError,
    WorkspaceStopError,
)
from agents.sandbox.files import FileEntry
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.pty_output import collect_pty_output
from agents.sandbox.session.pty_types import (
    PtyExecUpdate,
    allocate_pty_process_id,
    clamp_pty_yield_time_ms,
    process_id_to_prune_from_meta,
    resolve_pty_write_yield_time_ms,
)
from agents.sandbox.session.workspace_payloads import coerce_write_payload
from agents.sandbox.types import ExecResult, ExposedPortEndpoint, User
from agents.sandbox.util.tar_utils import UnsafeTarMemberError, safe_extract_tarfile

from vfsd.client.async_connection import AsyncProcess, abandon, finish
from vfsd.client.async_workspace import AsyncWorkspace
from vfsd.client.results import Snapshot
from vfsd.integrations.openai_agents.files import SandboxFiles
from vfsd.integrations.openai_agents.snapshot import VfsdSandboxSessionState, VfsdSnapshot, check_end, tar_stream
from vfsd.operations.fs import TerminalSize

_FINGERPRINT: Final = "vfsd_snapshot_v1"
_NO_COMMANDS: Final = "the workspace runs no commands: mount it with exec_on_host=True or sandbox='image:REF'"


class VfsdSandboxSession(BaseSandboxSession):
    """A session in a running workspace.  `VfsdSandboxClient` makes it.

    `commands` is where commands run, as in `Status.commands`.
    """

    state: VfsdSandboxSessionState

    def __init__(self, state: VfsdSandboxSessionState, workspace: AsyncWorkspace, commands: str | None) -> None:
        self.state = state
        self.workspace: Final = workspace
        self._commands: Final = commands
        self._is_on_host: Final = commands in (None, "on this host")
        self._terminals: Final = Terminals()
        self._is_started = False
        self._saving: Snapshot | None = None  # the state that `persist_workspace` is about to read

    # -- life ---------------------------------------------------------------------------------
    async def _after_start(self) -> None:
        self._is_started = True

    async def _after_start_failed(self) -> None:
        self._is_started = False

    async def _after_shutdown(self) -> None:
        self._is_started = False

    def _wrap_start_error(self, error: Exception) -> Exception:
        if isinstance(error, ConnectionError):
            return WorkspaceStartError(path=self._root, cause=error, message=str(error))
        return error

    def _wrap_stop_error(self, error: Exception) -> Exception:
        return WorkspaceStopError(path=self._root, cause=error)

    async def running(self) -> bool:
        """Whether the session was started and not shut down, and the workspace's daemon answers."""
        if not self._is_started:
            return False
        try:
            await self.workspace.status()
        except OSError:
            return False
        return True

    async def provision_manifest_accounts(self) -> None:
        self._check_accounts()
        await super().provision_manifest_accounts()

    async def _apply_manifest(self, *, only_ephemeral: bool = False, provision_accounts: bool = True) -> Any:
        self._check_accounts()
        return await super()._apply_manifest(only_ephemeral=only_ephemeral, provision_accounts=provision_accounts)

    def _check_accounts(self) -> None:
        if self._is_on_host and (self.state.manifest.users or self.state.manifest.groups):
            raise ValueError("users and groups of a manifest would be made on this host: mount with a sandbox")

    # -- commands -----------------------------------------------------------------------------
    async def exec(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
    ) -> ExecResult:
        """See `BaseSandboxSession.exec`.  When the command has ended, no process that it started runs."""
        async with self._failures(command), await self._start_command(command, shell, user, timeout) as process:
            done = await process.communicate()
        if done.timed_out:
            raise ExecTimeoutError(command=command, timeout_s=timeout)
        return ExecResult(stdout=done.stdout, stderr=done.stderr, exit_code=done.exit_status)

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        return await self.exec(*command, timeout=timeout, shell=False)

    async def _start_command(
        self,
        command: Sequence[str | Path],
        shell: bool | list[str],
        user: str | User | None,
        timeout_s: float | None = None,
        **others: Any,
    ) -> AsyncProcess:
        if self._commands is None:
            raise OSError(_NO_COMMANDS)
        # A container has users of its own; on this host sudo changes the user.
        name = user.name if isinstance(user, User) else user
        chosen = ["sh", "-c"] if shell is True else shell
        argv = self._prepare_exec_command(*command, shell=chosen, user=name if self._is_on_host else None)
        env = await self.state.manifest.environment.resolve()
        if self._is_on_host:
            env = {**env, "HOME": self.state.manifest.root}
        return await self.workspace.async_executor.start(
            argv, env=env, user=None if self._is_on_host else name, timeout_s=timeout_s, **others
        )

    @asynccontextmanager
    async def _failures(self, command: Sequence[str | Path]) -> AsyncGenerator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise ExecTransportError(command=command, cause=error, message=str(error)) from error

    def supports_pty(self) -> bool:
        return True

    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,  # noqa: ARG002
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        """Start a command that may run on after this call.  `timeout` has no effect, as in the SDK's own sessions."""
        async with self._failures(command):
            process = await self._start_command(
                command, shell, user, terminal=TerminalSize() if tty else None, has_input=tty
            )
        return await self._terminals.add(
            process, takes_input=tty, yield_time_s=yield_time_s, max_output_tokens=max_output_tokens
        )

    async def pty_write_stdin(
        self,
        *,
        session_id: int,
        chars: str,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        return await self._terminals.write(
            session_id, chars, yield_time_s=yield_time_s, max_output_tokens=max_output_tokens
        )

    async def pty_terminate_all(self) -> None:
        await self._terminals.end_all()

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        if not self._is_on_host:
            return await super()._resolve_exposed_port(port)
        return ExposedPortEndpoint(host="127.0.0.1", port=port, tls=False)

    # -- files --------------------------------------------------------------------------------
    @property
    def _root(self) -> Path:
        return Path(self.state.manifest.root)

    def _files(self) -> SandboxFiles:
        grants = {PurePosixPath(grant.path): grant.path for grant in self.state.manifest.extra_path_grants}
        if self._is_on_host:  # paths are resolved, and the grants with them
            grants = {PurePosixPath(Path(path).resolve()): str(Path(path).resolve()) for path in grants.values()}
        return SandboxFiles(self.workspace, PurePosixPath(self.state.manifest.root), grants)

    def normalize_path(self, path: Path | str, *, for_write: bool = False) -> Path:
        policy = self._workspace_path_policy()
        return policy.normalize_path(path, for_write=for_write, resolve_symlinks=self._is_on_host)

    def _entry_path(self, path: Path | str) -> Path:
        """Return the path of an entry that is removed, renamed or created: a symlink there is not followed."""
        lexical = self._workspace_path_policy().normalize_path(path, for_write=True)
        if lexical == self._root or not lexical.name:
            return lexical
        return self.normalize_path(lexical.parent, for_write=True) / lexical.name

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        if user is not None:
            await self._check_read_with_exec(path, user=user)
        located = self.normalize_path(path)
        return await abandon(lambda: self._files().read(located, path))

    async def _read_bounded(self, path: Path, *, max_bytes: int) -> bytes:
        located = self.normalize_path(path)
        return await abandon(lambda: self._files().read(located, path, max_bytes).getvalue())

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        """See `BaseSandboxSession.write`.  Readers see either the old content or the new one, unless `user` is set."""
        content = coerce_write_payload(path=path, data=data).stream
        located = self.normalize_path(path, for_write=True)
        if user is None:
            await finish(lambda: self._files().write(located, content))
            return
        line = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
        command = ("sh", "-c", line, "sh", str(located))
        async with (
            self._failures(command),
            await self._start_command(command, shell=False, user=user, has_input=True) as process,
        ):
            done = await process.communicate(await abandon(content.read))
        if done.exit_status:
            raise WorkspaceArchiveWriteError(path=located, context={"stderr": done.stderr.decode("utf-8", "replace")})

    async def _write_new_file(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        if user is not None:
            await super()._write_new_file(path, data, user=user)
            return
        content = coerce_write_payload(path=path, data=data).stream
        located = self._entry_path(path)
        await finish(lambda: self._files().create(located, content))

    async def ls(self, path: Path | str, *, user: str | User | None = None) -> list[FileEntry]:
        if user is not None:
            return await super().ls(path, user=user)
        located = self.normalize_path(path)
        return await abandon(lambda: self._files().entries(located))

    async def mkdir(self, path: Path | str, *, parents: bool = False, user: str | User | None = None) -> None:
        if user is not None:
            await super().mkdir(path, parents=parents, user=user)
            return
        located = self.normalize_path(path, for_write=True)
        await finish(lambda: self._files().mkdir(located, parents=parents))

    async def rm(self, path: Path | str, *, recursive: bool = False, user: str | User | None = None) -> None:
        """Remove a file, a symlink rather than its target, or a directory."""
        if user is not None:
            await super().rm(path, recursive=recursive, user=user)
            return
        located = self._entry_path(path)
        if recursive:
            self._workspace_path_policy().validate_recursive_remove(located)
        await finish(lambda: self._files().remove(located, recursive=recursive))

    async def mv(self, source: Path | str, destination: Path | str, *, user: str | User | None = None) -> None:
        if user is not None:
            await super().mv(source, destination, user=user)
            return
        old, new = self._entry_path(source), self._entry_path(destination)
        await finish(lambda: self._files().rename(old, new))

    async def same_file(
        self,
        left: Path | str,
        right: Path | str,
        *,
        follow_symlinks: bool = True,
        user: str | User | None = None,
    ) -> bool:
        if user is not None:
            return await super().same_file(left, right, follow_symlinks=follow_symlinks, user=user)
        find = self.normalize_path if follow_symlinks else self._entry_path
        a, b = find(left), find(right)
        return await abandon(lambda: self._files().is_same(a, b, follow_symlinks=follow_symlinks))

    # -- states -------------------------------------------------------------------------------
    async def _persist_snapshot(self) -> None:
        snapshot = self.state.snapshot
        if not isinstance(snapshot, VfsdSnapshot):
            await super()._persist_snapshot()
            return
        bound = snapshot.model_copy(update={"workspace": self.workspace.name})
        await self._remember(await self.workspace.snapshot(tag=bound.tag))
        self.state.snapshot = bound

    async def _compute_and_cache_snapshot_fingerprint(self, *, version: str | None = None) -> dict[str, str]:
        """Take the snapshot that `persist_workspace` is about to read, and identify it."""
        del version  # the SDK's own fingerprints are never written here
        tag = f"openai-agents {self.state.session_id} saved"
        earlier = [each.name for each in await self.workspace.snapshots(changes=False) if each.tag == tag]
        # Automatic, so that it goes when memory is short: the state itself is in the tar stream.
        self._saving = await self.workspace.snapshot(tag=tag, automatic=True)
        if earlier:
            await self.workspace.drop(*earlier)
        return {"fingerprint": self._identity(self._saving), "version": _FINGERPRINT}

    async def _delete_cached_snapshot_fingerprint_best_effort(self) -> None:
        if self._saving is not None:
            saving, self._saving = self._saving, None
            try:
                await self.workspace.drop(saving.name)
            except OSError:
                pass

    async def _remember(self, saved: Snapshot) -> None:
        self.state.snapshot_fingerprint = self._identity(saved)
        self.state.snapshot_fingerprint_version = _FINGERPRINT

    def _identity(self, snapshot: Snapshot) -> str:
        """A text for this snapshot of this run of this workspace, and for the manifest."""
        parts = (self.state.instance, snapshot.name, snapshot.created_at.isoformat(), self._resume_manifest_digest())
        return " | ".join(parts)

    async def _can_skip_snapshot_restore_on_resume(self, *, is_running: bool) -> bool:
        """Whether the files are those of the saved state.  `is_running` does not matter: a snapshot tells it."""
        del is_running
        return await self._live_workspace_matches_snapshot_on_resume()

    async def _live_workspace_matches_snapshot_on_resume(self) -> bool:
        """Whether nothing has changed since the state was saved, apart from the paths that are not saved."""
        for snapshot in await self.workspace.snapshots(changes=False):
            if self._identity(snapshot) == self.state.snapshot_fingerprint:
                changed = (await self.workspace.diff(snapshot.name)).changes
                return all(self._is_skipped(PurePosixPath(change.path)) for change in changed)
        return False

    def _is_skipped(self, path: PurePosixPath) -> bool:
        return any(path.is_relative_to(skipped) for skipped in self._workspace_fingerprint_skip_relpaths())

    async def persist_workspace(self) -> io.IOBase:
        """Return the workspace as a tar stream, read from one snapshot."""
        kept, self._saving = self._saving, None
        saved = kept or await self.workspace.snapshot(tag="openai-agents export")
        skipped = self._persist_workspace_skip_relpaths()
        try:
            return await tar_stream(
                self.workspace,
                saved.name,
                lambda path: not any(path.is_relative_to(each) for each in skipped),
                root=self.state.manifest.root,
            )
        except (OSError, tarfile.TarError) as error:
            raise WorkspaceArchiveReadError(path=self._root, cause=error) from error
        finally:
            if kept is None:
                await self.workspace.drop(saved.name)

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        """Extract a tar stream into the workspace.  If that fails, nothing has changed."""

        def extract() -> None:
            with tarfile.open(fileobj=data, mode="r:*") as tar:
                check_end(tar)
                safe_extract_tarfile(tar, root=Path(self.workspace.path))

        try:
            async with self.workspace.transaction(tag="openai-agents hydrate"):
                await finish(extract)
        except UnsafeTarMemberError as error:
            context = {"reason": error.reason, "member": error.member}
            raise WorkspaceArchiveWriteError(path=self._root, context=context, cause=error) from error
        except (tarfile.TarError, OSError) as error:
            raise WorkspaceArchiveWriteError(path=self._root, cause=error) from error

    async def _restore_snapshot_into_workspace_on_resume(self) -> None:
        """Replace the files by the saved state.  If that fails, nothing has changed.  `undo` takes it back."""
        snapshot = self.state.snapshot
        if isinstance(snapshot, VfsdSnapshot) and snapshot.workspace == self.workspace.name:
            found = await snapshot.found()
            if found is None:
                raise WorkspaceStartError(path=self._root, message=f"nothing was saved with the id {snapshot.id}")
            restored = await self.workspace.restore(found[1].name)
            if restored.problems:
                path, reason = next(iter(restored.problems.items()))
                raise WorkspaceStartError(path=self._root, message=f"{path} could not be restored: {reason}")
            for skipped in self._persist_workspace_skip_relpaths():
                await self.rm(skipped, recursive=True)
            return
        async with self.workspace.transaction(tag="openai-agents resume"):
            await super()._restore_snapshot_into_workspace_on_resume()


# -- terminals -------------------------------------------------------------------------------------
# The daemon runs 64 interactive commands at once; the others are for `exec`.
_MOST: Final = 48
_KEPT_BYTES: Final = 16 << 20  # of output that the agent has not read; the oldest is dropped
_START_YIELD_S: Final = 10.0
_WRITE_YIELD_S: Final = 0.25
_INPUT_S: Final = 30.0
_ECHO_S: Final = 0.1


@dataclass
class _Terminal:
    process: AsyncProcess
    takes_input: bool
    chunks: deque[bytes] = field(default_factory=deque)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    notify: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    exit_code: int | None = None
    last_used: float = field(default_factory=time.monotonic)
    pump: asyncio.Task[None] | None = None

    async def pump_output(self) -> None:
        """Collect output until the command has ended."""
        size = 0
        try:
            while outputs := await self.process.receive():
                async with self.lock:
                    self.chunks.extend(output.data for output in outputs)
                    size = sum(map(len, self.chunks))
                    while size > _KEPT_BYTES:
                        size -= len(self.chunks.popleft())
                self.notify.set()
            ended = self.process.ended
            assert ended is not None, "`receive` returned an empty list"
            self.exit_code = ended.exit_status
        except OSError as error:  # the daemon is gone
            self.chunks.append(f"\n{error}\n".encode())
            self.exit_code = 1
        finally:
            self.closed.set()
            self.notify.set()


class Terminals:
    """The running commands, by number."""

    def __init__(self) -> None:
        self._terminals: Final[dict[int, _Terminal]] = {}

    async def add(
        self, process: AsyncProcess, *, takes_input: bool, yield_time_s: float | None, max_output_tokens: int | None
    ) -> PtyExecUpdate:
        """Add a command that has just started, and return its first output."""
        terminal = _Terminal(process, takes_input)
        terminal.pump = asyncio.create_task(terminal.pump_output())
        if len(self._terminals) >= _MOST:
            uses = [(number, each.last_used, each.closed.is_set()) for number, each in self._terminals.items()]
            oldest = process_id_to_prune_from_meta(uses)
            if oldest is not None:
                await _end(self._terminals.pop(oldest))
        number = allocate_pty_process_id(set(self._terminals))
        self._terminals[number] = terminal
        seconds = _START_YIELD_S if yield_time_s is None else yield_time_s
        return await self._update(number, terminal, clamp_pty_yield_time_ms(int(seconds * 1000)), max_output_tokens)

    async def write(
        self, number: int, chars: str, *, yield_time_s: float | None, max_output_tokens: int | None
    ) -> PtyExecUpdate:
        """Write to a command's terminal, and return its new output.

        PtySessionNotFoundError if no such command runs.  RuntimeError if it has no terminal, or does not read.
        """
        terminal = self._terminals.get(number)
        if terminal is None:
            raise PtySessionNotFoundError(session_id=number)
        if chars:
            if not terminal.takes_input:
                raise RuntimeError("stdin is not available for this process")
            try:
                async with asyncio.timeout(_INPUT_S):
                    await terminal.process.send_input(chars.encode())
            except BrokenPipeError:
                pass  # it has ended; the update says so
            except TimeoutError:
                raise RuntimeError(f"the process has read no input for {_INPUT_S:g} s") from None
            await asyncio.sleep(_ECHO_S)
        seconds = _WRITE_YIELD_S if yield_time_s is None else yield_time_s
        wait_ms = resolve_pty_write_yield_time_ms(yield_time_ms=int(seconds * 1000), input_empty=not chars)
        terminal.last_used = time.monotonic()
        return await self._update(number, terminal, wait_ms, max_output_tokens)

    async def _update(
        self, number: int, terminal: _Terminal, wait_ms: int, max_output_tokens: int | None
    ) -> PtyExecUpdate:
        output, token_count, is_closed = await collect_pty_output(
            output_chunks=terminal.chunks,
            output_lock=terminal.lock,
            output_notify=terminal.notify,
            is_done=terminal.closed.is_set,
            yield_time_ms=wait_ms,
            max_output_tokens=max_output_tokens,
        )
        if not is_closed:
            return PtyExecUpdate(number, output, None, token_count)
        ended = self._terminals.pop(number, None)
        if ended is not None:
            await _end(ended)
        return PtyExecUpdate(None, output, terminal.exit_code, token_count)

    async def end_all(self) -> None:
        """Kill all commands with their processes."""
        terminals = list(self._terminals.values())
        self._terminals.clear()
        for terminal in terminals:
            await _end(terminal)


async def _end(terminal: _Terminal) -> None:
    if terminal.pump is not None:
        terminal.pump.cancel()
        await asyncio.gather(terminal.pump, return_exceptions=True)
    terminal.process.close()
