"""What a merge needs of two daemons: the changes of one workspace, sent to another one that has a state in common."""
