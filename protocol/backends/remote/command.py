"""RemoteCommand: the command that gives a Python, as the user wrote it.

The options that make that Python wait for the helper are added at its end.  They contain no character that a shell
changes, because ssh passes a command through a shell, and `docker exec` does not.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Final

# -I -S: nothing from the directory is imported.  -i: Python runs each line when it arrives.  Without -i it would read
# its standard input to the end first.  -q: no banner.
_OPTIONS: Final = ("-I", "-S", "-q", "-i")


@dataclass(frozen=True, slots=True)
class RemoteCommand:
    """A command line, split into words as a shell splits it.

    No shell runs it: quotes and backslashes have their meaning, everything else (variables, pipes) is text.

    ValueError if it has no words, or an open quote.
    """

    text: str

    def __post_init__(self) -> None:
        try:
            words = shlex.split(self.text)
        except ValueError as error:
            raise ValueError(f"the command {self.text!r} cannot be split into words: {error}") from None
        if not words or not words[0]:
            raise ValueError("the command is empty: give one that starts a Python, such as exec:'ssh HOST python3'")

    @property
    def argv(self) -> list[str]:
        """The words to run."""
        return [*shlex.split(self.text), *_OPTIONS]

    # -- `protocol.backends.container.connection.Target` ---------------------------------------------------
    @property
    def label(self) -> str:
        return f"the command `{self.text}`"

    @property
    def no_answer(self) -> str:
        return f"{self.label} does not answer"

    def check(self) -> RemoteCommand:
        return self

    def describe(self) -> str:
        return self.label

    def advice(self, reason: str) -> str:
        why = f" ({reason})" if reason else ""
        return f"{self.label} is not connected{why}; vfsd goes on running it until it answers"
