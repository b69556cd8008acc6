"""The `vfsd` command for the hooks of agents: `python -I -S .../hook_client.py snapshot ...`.

`-I -S` skips the import of `site`, which takes a third of the start-up time.  Wrong usage exits with status 1, because
hook runners treat status 2 as an error that blocks the agent.
"""

from __future__ import annotations

import sys

try:
    import os

    # At the end: modules of the standard library come first.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from vfsd.cli import fast_path
    from vfsd.client.quick_call import run_for_agent
except KeyboardInterrupt:
    sys.exit(130)


def main() -> None:
    """Run a command with the exit statuses of a hook."""
    try:
        sys.exit(min(run_for_agent(lambda: fast_path.main(prepare=_add_installed_packages)), 1))
    except KeyboardInterrupt:
        sys.exit(130)


def _add_installed_packages() -> None:
    import site  # noqa: PLC0415 start-up: only the full command needs other packages

    site.main()


if __name__ == "__main__":
    main()
