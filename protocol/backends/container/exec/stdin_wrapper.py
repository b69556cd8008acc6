"""StdinWrapper: a command in a container that is given input, and loses none of its output by not reading it.

Podman passes input on to the command's monitor as it comes.  When the command ends before it has read all of it, the
monitor closes a socket with something unread, which resets it; then Podman drops output that it has not read yet,
and writes "Error: read unixpacket ... connection reset by peer" among the command's own errors (seen with 4.3, in
half of such commands that are short).  So a shell stands between: when the command has ended, it says so, behind
a mark that nobody can guess, on standard error, and reads input until that ends; which whoever saw the mark sees to.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

__all__ = ["StdinWrapper"]

# In a subshell: `exec` runs a program, never what the shell has of that name built in.  What the shell itself has to
# say of the command's death is not the command's.  Signals go to the whole group: the shell has to live on.
_SCRIPT: Final = r"""
trap : HUP INT QUIT USR1 USR2 ALRM TERM
mark=$1; shift
exec 9>&2 2>/dev/null
if case $1 in */*) [ -e "$1" ] ;; *) command -v "$1" >/dev/null ;; esac; then
  (exec "$@" 2>&9 9>&-)
  status=$? said=$?
else
  status=127 said=missing
fi
printf '\0%s %s\n' "$mark" "$said" >&9
cat >/dev/null || while read -r line; do :; done
exit "$status"
"""


class StdinWrapper:
    """`argv` is what to run; `errors` takes what comes on standard error.  `has_ended` is set at the mark."""

    def __init__(self, argv: Sequence[str]) -> None:
        mark = secrets.token_hex(16)
        self.argv: Final = ["/bin/sh", "-c", _SCRIPT, "sh", mark, *argv]
        self.has_ended = False
        self.is_missing = False
        self._mark = b"\0" + mark.encode() + b" "
        self._held = b""

    def errors(self, data: bytes) -> bytes:
        """What of `data`, and of what came before it, the command has written."""
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
        """At the end: what was held for the mark that it might have begun."""
        held, self._held = self._held, b""
        return held
