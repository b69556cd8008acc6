"""The commands that a workspace runs: where (`place`, `host`), and until when (`running`)."""
