"""Commands under supervision: one core for this host and for containers.

- `executor`: the contract of `Executor`, and the types of a command and its result.
- `runner`: the contract of `CommandRunner`, which starts commands; `CommandRun`, which runs one within its limits; and
  `BlockingExecutor`, an `Executor` for threads over any runner.
- `host`: a runner for this host.  Each command has a supervisor process (`supervisor`).
"""
