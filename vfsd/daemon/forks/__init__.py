"""Forks of a workspace: daemons that start with its state, by fork(2) or over a stored snapshot."""
