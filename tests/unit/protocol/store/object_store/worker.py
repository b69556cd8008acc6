"""A pusher or a collector that works until it is killed; for test_collect.

python -m ... push URL LOCAL ID       prints "pushed NAME" after each push, "dropping NAME" before each drop
python -m ... collect URL
"""

from __future__ import annotations

import itertools
import os
import random
import sys

from protocol.store import Store
from protocol.store.object_store import RemoteStore, open_storage, upkeep

KEY = "host:/w"
STATES = 8
GRACE_S = 1.0


def opened(url: str) -> RemoteStore:
    return RemoteStore(open_storage(url), grace_s=GRACE_S)


def push(url: str, local: str, worker: str) -> None:
    made = random.Random(os.getpid())
    mine: list[str] = []
    with Store(local) as store:
        for number in itertools.count():
            with opened(url) as remote:
                name = f"w{worker}-{os.getpid()}-{number}"
                remote.push(store, KEY, f"state{made.randrange(STATES)}", name=name)
                print("pushed", name, flush=True)
                mine.append(name)
                shared = made.random() < 0.2
                if shared:
                    remote.push(store, KEY, f"state{made.randrange(STATES)}", name="shared", replace=True)
                    print("pushed shared", flush=True)
                while len(mine) > 2 or (mine and made.random() < 0.5):
                    dropped = mine.pop(0)
                    print("dropping", dropped, flush=True)
                    remote.drop(KEY, dropped)


def gather(url: str) -> None:
    upkeep._CLOCK_ERROR_S = 0.0  # a directory has exact times
    while True:
        with opened(url) as remote:
            report = remote.collect_garbage()
            print("freed", report.freed_packs, flush=True)


if __name__ == "__main__":
    (push if sys.argv[1] == "push" else gather)(*sys.argv[2:])
