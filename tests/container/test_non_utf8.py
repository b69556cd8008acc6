"""Commands in a container whose words, variables or directory are not UTF-8: every byte arrives."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping

import pytest

from protocol.backends.container.exec.runner import ContainerCommandRunner
from protocol.backends.container.podman.service import Container
from protocol.execution.runner import BlockingExecutor
from tests.container.conftest import StartContainer, inside

# Each byte that a word can have, with newlines at the end, which a shell's $() drops.
RAW = os.fsdecode(bytes(range(1, 256)) + b"\n\n")


@pytest.fixture
def container(start_container: StartContainer) -> Container:
    container = start_container()
    inside(container, "mkdir -p /workspace")
    return container


@pytest.fixture
def executor(container: Container) -> BlockingExecutor:
    return BlockingExecutor(ContainerCommandRunner(lambda: container, "/workspace"))


@pytest.mark.extended
@pytest.mark.parametrize("stdin", [b"", b"input"], ids=["without input", "with input"])
def test_words_and_variables_arrive_with_every_byte(executor: BlockingExecutor, stdin: bytes) -> None:
    script = 'printf %s "$1" "$PLAIN" "$RAW"; cat'
    env = {"PLAIN": "ä", "RAW": RAW}

    result = executor.run(["sh", "-c", script, "sh", RAW], env=env, stdin=stdin)

    assert (result.exit_status, result.stderr) == (0, b"")
    assert result.stdout == os.fsencode(RAW) + "ä".encode() + os.fsencode(RAW) + stdin
    assert executor.run(["printf", "%s", os.fsdecode(b"\xff")]).stdout == b"\xff"
    assert executor.run(["sh", "-c", "exit 7", RAW]).exit_status == 7


@pytest.mark.extended
@pytest.mark.parametrize("stdin", [b"", b"input"], ids=["without input", "with input"])
def test_a_directory_and_a_program_may_have_any_name(executor: BlockingExecutor, stdin: bytes) -> None:
    name = os.fsdecode(b"d\xff")
    executor.run(["mkdir", name])

    assert executor.run(["pwd"], cwd=name, stdin=stdin).stdout == b"/workspace/d\xff\n"
    executor.run(["cp", "/bin/busybox", os.fsdecode(b"d\xff/echo")])
    assert executor.run([os.fsdecode(b"./d\xff/echo"), "x"], stdin=stdin).stdout == b"x\n"


@pytest.mark.extended
@pytest.mark.parametrize("stdin", [b"", b"input"], ids=["without input", "with input"])
def test_what_is_missing_is_named(executor: BlockingExecutor, stdin: bytes) -> None:
    program = os.fsdecode(b"no-\xff")
    with pytest.raises(FileNotFoundError) as caught:
        executor.run([program], stdin=stdin)
    assert caught.value.filename == program
    with pytest.raises(FileNotFoundError) as caught:
        executor.run(["pwd"], cwd=program, stdin=stdin)
    assert caught.value.filename == f"/workspace/{program}"


@pytest.mark.extended
@pytest.mark.parametrize(
    "env", [{"A-B": os.fsdecode(b"\xff")}, {os.fsdecode(b"N\xff"): "x"}], ids=["no name for a shell", "raw name"]
)
def test_a_variable_that_no_shell_can_set_is_refused(executor: BlockingExecutor, env: Mapping[str, str]) -> None:
    with pytest.raises(OSError, match="needs a name of letters") as caught:
        executor.run(["true"], env=env)
    assert caught.value.errno == errno.EILSEQ


def test_without_a_shell_such_a_command_is_refused(container: Container, executor: BlockingExecutor) -> None:
    inside(container, "rm /bin/sh")
    with pytest.raises(OSError, match="needs /bin/sh") as caught:
        executor.run(["/bin/echo", RAW])
    assert caught.value.errno == errno.EILSEQ
    assert executor.run(["/bin/echo", "plain"]).stdout == b"plain\n"
