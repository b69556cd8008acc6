"""`python -m tests.differential.replay DIRECTORY < CALLS`: make the calls of a script there; print the answers."""

from __future__ import annotations

import marshal
import os
import sys

from tests.differential.compare import executors
from tests.differential.executor import receive, send
from tests.differential.script import parse, render


def main() -> None:
    with executors() as nursery, nursery.team(os.path.abspath(sys.argv[1])) as team:
        for call in parse(sys.stdin.read()):
            send(team[call.worker], [(call.operation, call.args)])
            ((answer, places),) = marshal.loads(receive(team[call.worker]))
            print(render(call), "->", *answer)
            for label, seen in places:
                print("   ", label, seen)


if __name__ == "__main__":
    main()
