"""``python -m adaptive_spec.cli``."""

from adaptive_spec.cli import app

app()
