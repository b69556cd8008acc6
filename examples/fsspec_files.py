"""fsspec (extra `fsspec`): `vfsd mount /tmp/agent --name agent`, `python examples/fsspec_files.py agent`.

Mount an empty workspace: the example writes into it.
"""

from __future__ import annotations

import sys

import fsspec


def main(name: str) -> None:
    files = fsspec.filesystem("vfsd")  # of all workspaces; pandas, dask and pyarrow take the URLs themselves
    with files.transaction:  # both files appear, complete, when the block ends
        for table, lines in (("a", "x,y\n1,2\n"), ("b", "x,y\n")):
            with fsspec.open(f"vfsd://{name}/data/{table}.csv", "w") as file:
                file.write(lines)
    print([path.removeprefix(f"{name}/") for path in files.find(name)])
    print(sum(content.count(b"\n") for content in files.cat(f"{name}/data/*.csv").values()), "lines")

    workspace = files.workspace(name)
    before = workspace.snapshot()
    files.rm(f"{name}/data", recursive=True)
    workspace.restore(before.name)
    print("restored:", [path.removeprefix(f"{name}/") for path in files.find(name)])


if __name__ == "__main__":
    main(sys.argv[1])
