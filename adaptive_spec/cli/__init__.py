"""The command line.  Thin: it parses, calls, prints.

What is heavy to import is imported inside the command that needs it, so that ``--help`` is instant.  Exit codes:
0 done, 1 a check or a run failed, 2 an error with a message, 3 the gate refused the run's candidate.
"""

import os

# Threads that wait for work sleep.  By default they spin, and beside another busy process decoding then collapses.
# OpenMP reads this once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from adaptive_spec.cli import (  # noqa: I001, in the order of the help
    serving,
    records,
    runs,
    releases,
    thresholds,
    learning,
    traces,
    models,
    checks,
    benches,
    configuration,
    tokens,
)
from adaptive_spec.cli.apps import app

__all__ = [
    "app",
    "benches",
    "checks",
    "configuration",
    "learning",
    "models",
    "records",
    "releases",
    "runs",
    "serving",
    "thresholds",
    "tokens",
    "traces",
]
