"""Run commands on this host under supervision."""
