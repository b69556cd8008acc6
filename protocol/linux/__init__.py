"""System calls and file formats of Linux that Python's `os` lacks, and safe access below a host directory."""
