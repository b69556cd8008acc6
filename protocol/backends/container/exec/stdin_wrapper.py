"""StdinWrapper: a shell around a command with input, so that input that the command leaves unread costs no output.

Podman passes input to the command's monitor as it arrives.  If the command ends before it has read all of it, the
monitor closes a socket with unread data, which resets the connection; then Podman drops output that it has not read
yet, and writes "Error: read unixpacket ... connection reset by peer" to the command's standard error (seen with 4.3,
in half of such commands that are short).  So the wrapper announces the command's end on standard error, after a random
mark, and reads the remaining input; the caller ends the input when it sees the mark.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

# In a subshell, because `exec` runs a program and never a builtin of that name.  Descriptor 9 keeps the shell's own
# messages about the command's death out of its standard error.  Signals go to the whole group, so the shell traps them.
_SCRIPT: Final = r"""
trap : HUP INT QUIT USR1 USR2 ALRM TERM
mark=$1; shift
exec 9>&2 2>/dev/null
if case $1 in */*) [ -e "$1" ] ;; *) command -v "$1" >/dev/null ;; esac; then
  (exec "$@" 2>&9 9>&-)
  status=$? result=$?
else
  status=127 result=missing
fi
printf '\0%s %s\n' "$mark" "$result" >&9
cat >/dev/null || while read -r line; do :; done
exit "$status"
"""


class StdinWrapper:
    """`argv` is the wrapped command; `errors` filters its standard error.  `has_ended` is set at the mark."""

    def __init__(self, argv: Sequence[str]) -> None:
        mark = secrets.token_hex(16)
        self.argv: Final = ["/bin/sh", "-c", _SCRIPT, "sh", mark, *argv]
        self.has_ended = False
        self.is_missing = False
        self._mark = b"\0" + mark.encode() + b" "
        self._held = b""

    def errors(self, data: bytes) -> bytes:
        """The part of `data`, and of data held back before, that the command itself has written."""
        if self.has_ended:
            return b""
        data, self._held = self._held + data, b""
        said, mark, rest = data.partition(self._mark)
        if mark and b"\n" in rest:
            self.has_ended = True
            self.is_missing = rest.startswith(b"missing")
            return said
        start = data.rfind(b"\0") if not mark else len(said)
        if start >= 0 and (mark or self._mark.startswith(data[start:])):
            self._held = data[start:]
            return data[:start]
        return data

    def rest(self) -> bytes:
        """After the end of the output: the data that was held back as a possible start of the mark."""
        held, self._held = self._held, b""
        return held
