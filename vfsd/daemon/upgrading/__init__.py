"""Upgrade: a daemon of the installed version takes a workspace over while programs use it.

`giving` is the side of the old daemon, `taking` that of the new one, `messages` what they say to each other.
"""
