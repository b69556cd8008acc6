"""Commands under supervision: one core for this host and for containers.

- `executor`: the contract of `Executor`, and the types of a command and its result.
- `runner`: the contract of `CommandRunner`, which starts commands, and `CommandRun`, which runs one within its limits.
- `host`: a runner for this host.  Each command has a supervisor process (`supervisor`).
- `blocking`: an `Executor` for threads over any runner.
"""
