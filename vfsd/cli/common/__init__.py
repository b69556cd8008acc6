"""Shared parts of the commands: base classes, output, interrupts, values and their completion."""
