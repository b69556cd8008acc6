"""Run commands in a container, and end everything that they started."""
