"""A program that the tests fork sees what one sees that is started, and ends as that does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import zygote

PROBE = "tests.unit.repository.probe"
COMMAND = [sys.executable, "-m", PROBE]


@pytest.fixture(autouse=True)
def forks() -> None:
    if zygote.is_off():
        pytest.skip("nothing is forked here: under coverage every process is started, to be measured")


def run(*words: str, flags: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    # The variables that os.environ does not know are those that readline sets, LINES and COLUMNS.
    options.setdefault("env", dict(os.environ))
    done = subprocess.run(
        [sys.executable, *flags, "-m", PROBE, *words], check=False, capture_output=True, text=True, **options
    )
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for report in reports:
        report["descriptors"] = [  # a pipe has another number each time
            (number, target.partition(":")[0]) for number, target in report["descriptors"].items()
        ]
        if len(reports) > 1:
            del report["parent"]
    rest = [line for line in done.stdout.splitlines() if not line.startswith("{")]
    error = [line for line in done.stderr.splitlines() if not line.startswith(" ")]
    return {"reports": reports, "rest": rest, "error": error, "status": done.returncode}


def differences(forked: dict[str, Any], started: dict[str, Any]) -> list[tuple[Any, Any]]:
    pairs = [(forked[key], started[key]) for key in ("rest", "error", "status")]
    assert len(forked["reports"]) == len(started["reports"])
    for one, other in zip(forked["reports"], started["reports"], strict=True):
        pairs += [((key, one[key]), (key, other[key])) for key in other if key != "environment"]
        variables = sorted({*one["environment"], *other["environment"]})
        pairs += [((key, one["environment"].get(key)), (key, other["environment"].get(key))) for key in variables]
    return [(one, other) for one, other in pairs if one != other]


@pytest.mark.parametrize(
    ("words", "flags", "options"),
    [
        pytest.param(("0", "an argument", "\udcff"), (), {}, id="arguments"),
        pytest.param((), ("-P",), {"cwd": "/"}, id="directory"),
        pytest.param((), (), {"start_new_session": True}, id="session"),
        pytest.param((), (), {"process_group": 0}, id="group"),
        pytest.param((), (), {"stdin": subprocess.DEVNULL}, id="input"),
        pytest.param((), (), {"env": {**os.environ, "A": "\udcfe", "TZ": "Asia/Tokyo"}}, id="environment"),
        pytest.param((), (), {"env": {**os.environ, "PYTHONIOENCODING": "latin-1"}}, id="encoding"),
        *[
            pytest.param((end,), (), {}, id=end)
            for end in ("3", "interrupt", "thread", "signal", "child", "raise", "say")
        ],
    ],
)
def test_a_forked_program_sees_and_does_what_a_started_one_does(
    words: tuple[str, ...], flags: tuple[str, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    if "env" in options:
        options["env"] = {**options["env"], "PYTHONPATH": os.environ["PYTHONPATH"]}
    before = os.umask(0o137)
    try:
        forked = run(*words, flags=flags, **options)
        with zygote.starting_interpreters():
            started = run(*words, flags=flags, **options)
    finally:
        os.umask(before)
    assert differences(forked, started) == []


def test_it_has_the_descriptors_that_it_was_passed_and_no_other() -> None:
    reader, writer = os.pipe()
    other = os.open("/", os.O_PATH)
    try:
        forked = run(pass_fds=(writer,))
        with zygote.starting_interpreters():
            started = run(pass_fds=(writer,))
    finally:
        for descriptor in (reader, writer, other):
            os.close(descriptor)
    assert differences(forked, started) == []
    assert [str(writer), "pipe"] in [list(each) for each in forked["reports"][0]["descriptors"]]


def test_it_is_forked_indeed() -> None:
    process = subprocess.Popen([*COMMAND, "sleep"], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.kill()
    assert b"tests.support.zygote" in command
    assert process.returncode == -signal.SIGKILL


def test_a_caller_with_another_limit_or_user_starts_it_as_usual() -> None:
    def is_forked(**options: Any) -> bool:
        code = subprocess.Popen([*COMMAND, "sleep"], stdout=subprocess.PIPE, text=True, **options)
        with code:
            assert code.stdout is not None
            code.stdout.readline()
            command = Path(f"/proc/{code.pid}/cmdline").read_bytes()
            code.kill()
        return b"tests.support.zygote" in command

    assert not is_forked(preexec_fn=lambda: None)
    old = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        assert not is_forked()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


@pytest.mark.parametrize("words", [[], [sys.executable], [sys.executable, "-c", "print(1)"], ["true"]])
def test_other_commands_are_started_as_usual(words: list[str]) -> None:
    if not words:
        with pytest.raises((IndexError, ValueError)):
            subprocess.run(words, check=False)
        return
    assert subprocess.run(words, check=False, capture_output=True, stdin=subprocess.DEVNULL).returncode == 0


def test_a_directory_that_does_not_exist_is_the_error_of_popen(workdir: Path) -> None:
    with pytest.raises(FileNotFoundError):
        subprocess.run(COMMAND, check=False, cwd=workdir / "none")
