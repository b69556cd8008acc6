"""The method `policy`: show the policy of the workspace, and tighten it.

Threading: the serving loop.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from vfsd.daemon.control.call_context import CallContext, Handler
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.wire.messages import PolicyParams, PolicyResult, from_wire_path, wire_path
from vfsd.wire.option_rules import OptionError, check_policy_size

_NO_POLICY = (
    "this workspace was mounted without a policy, so programs may have mapped its files unasked: mount it with"
    " --protect or --hide to set one and tighten it later"
)


def policy_method(mounted: MountedVolume) -> Handler:
    """Return the handler.  Adding patterns fails with EOPNOTSUPP for a workspace without a policy."""

    async def policy(params: PolicyParams, call: CallContext) -> PolicyResult:
        protect, hide = ([os.fsdecode(from_wire_path(each)) for each in some] for some in (params.protect, params.hide))
        found = mounted.policy
        if found is None:
            if protect or hide:
                raise OSError(errno.EOPNOTSUPP, _NO_POLICY)
            return PolicyResult([], [])
        open_files: list[bytes] = []
        if protect or hide:
            _check_tightens((*protect, *hide))
            now = found.options
            try:
                check_policy_size(
                    {"protect": (*now.protect, *protect), "hide": (*now.hide, *hide)},
                )
                call.commit()
                open_files = await found.tighten(protect, hide, mounted)
            except OptionError as error:
                reason = error.message({"protect": "--protect", "hide": "--hide"})
                raise OSError(errno.EINVAL, reason) from None
            except ValueError as error:
                raise OSError(errno.EINVAL, str(error)) from None
        now = found.options
        shown, hidden = ([wire_path(os.fsencode(each)) for each in some] for some in (now.protect, now.hide))
        return PolicyResult(shown, hidden, list(map(wire_path, open_files)))

    return policy


def _check_tightens(patterns: Sequence[str]) -> None:
    for each in patterns:
        if each.startswith("!"):
            reason = f"the pattern {each} would take something back, and a policy can only be tightened"
            raise OSError(errno.EINVAL, f"{reason}: give such patterns to `vfsd mount`")
