"""A terminal with an interactive shell, as a person uses it: job control included."""

from __future__ import annotations

import os
import re
import subprocess
from types import TracebackType
from typing import Any, Self

from tests.support.waiting import readable

_TIMEOUT_S = 60.0
_PROMPT = "ready> "


class Shell:
    """bash on a pty.  `type` sends keys, `expect` waits for text; `keys` such as "\\x03" are those of a terminal."""

    def __init__(self, **popen: Any) -> None:
        self._ours, theirs = os.openpty()
        self._text = ""
        environment = {**os.environ, **popen.pop("env", {}), "PS1": _PROMPT, "TERM": "dumb"}
        # -c: the pty becomes the controlling terminal of the new session.
        command = ["setsid", "-c", "bash", "--norc", "--noprofile", "--noediting", "-i"]
        self._process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, **popen)
        os.close(theirs)
        self.expect(_PROMPT)

    def type(self, keys: str) -> None:
        """Send keys; "\\n" is Enter."""
        os.write(self._ours, keys.encode())

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait until the output after the last match matches `pattern`."""
        while (found := re.search(pattern, self._text)) is None:
            assert readable(self._ours, _TIMEOUT_S), f"{pattern!r} is not in {self._text!r}"
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # EIO is what a pty says at its end (pty(7))
                data = b""
            assert data, f"{pattern!r} is not in {self._text!r}"
            self._text += data.decode("utf-8", "replace").replace("\r\n", "\n")
        self._text = self._text[found.end() :]
        return found

    def run(self, line: str) -> None:
        """Type a command line, and drop its echo."""
        self.type(line + "\n")
        self.expect(re.escape(line[-20:]) + r"\n")

    def status(self) -> int:
        """The exit status of the last command; the shell must be at its prompt."""
        self.expect(_PROMPT)
        self.run("echo status=$?")
        status = int(self.expect(r"status=(\d+)\n")[1])
        self.expect(_PROMPT)
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._ours)  # SIGHUP for what still runs
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
