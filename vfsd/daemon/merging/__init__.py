"""The two daemons of a merge: the changes of one workspace, sent to a workspace that has a state in common with it."""
