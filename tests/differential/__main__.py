"""`python -m tests.differential --calls 1000000 --engine native [--seed N]`: as many random calls as you like.

Every difference is reduced to a script, and the run goes on with the next episode.  Exit status 1 where
there was one.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

from tests.differential.benches import BENCHES
from tests.differential.campaign import Campaign
from tests.differential.compare import Bench
from tests.differential.script import parse, script
from vfsd.operations.declaration import CacheChoice


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is mounted is unmounted
    with tempfile.TemporaryDirectory(prefix="vfsd-diff-", ignore_cleanup_errors=True) as directory:
        os.environ["VFSD_RUNTIME_DIR"] = os.path.join(directory, "run")
        os.mkdir(os.environ["VFSD_RUNTIME_DIR"], 0o700)
        place = Path(directory, "work")
        place.mkdir()
        place.parent.chmod(0o755)
        with BENCHES[arguments.backend](
            arguments.engine, place, os.environ["VFSD_RUNTIME_DIR"], cache=arguments.cache
        ) as bench:
            if arguments.replay:
                found = bench.run(parse(Path(arguments.replay).read_text()), tree_every=1)
                print(found or "no difference")
                return int(found is not None)
            return _campaign(bench, arguments)


def _campaign(bench: Bench, arguments: argparse.Namespace) -> int:
    start = time.monotonic()
    campaign = Campaign(bench, arguments.seed, episode_calls=arguments.episode, reduce_failures=not arguments.no_reduce)
    shown = start
    for finding in campaign.run(arguments.calls, first=arguments.first):
        if finding is not None:
            print(f"\n== episode {finding.episode}, seed {arguments.seed}: {finding.difference}")
            print(script(finding.calls), flush=True)
            if len(campaign.findings) >= arguments.max_findings:
                break
        if time.monotonic() - shown > 30:
            shown = time.monotonic()
            rate = campaign.calls / (shown - start)
            print(f"-- {campaign.calls} calls, {rate:.0f}/s, {len(campaign.findings)} differences", flush=True)
    seconds = time.monotonic() - start
    print(f"{bench.engine}, {arguments.backend}, {bench.cache}, seed {arguments.seed}: {campaign.calls} calls "
          f"in {seconds:.0f} s, {len(campaign.findings)} differences")  # fmt: skip
    for difference in campaign.passing:
        print(f"  once, and not again: {difference}")
    for known, count in bench.seen.items():
        print(f"  known, {count} times: {known.why} ({known.section})")
    return int(bool(campaign.findings))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--engine", choices=("native", "pyfuse3"), default="native")
    parser.add_argument("--cache", choices=get_args(CacheChoice), default="writethrough")
    parser.add_argument("--backend", choices=BENCHES, default="memory")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--episode", type=int, default=400, help="calls of one episode, in fresh directories")
    parser.add_argument("--first", type=int, default=0, help="number of the first episode")
    parser.add_argument("--max-findings", type=int, default=10, help="stop after so many differences")
    parser.add_argument("--no-reduce", action="store_true", help="report differences as they were found")
    parser.add_argument("--replay", metavar="SCRIPT", help="make the calls of a script instead")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
