"""Schemathesis against the document that the service gives of itself.  ``make test-clients``.

One of its checks is left out: that whatever fits the schema is accepted.  What a schema cannot say is answered with
400: that a prompt fits the context, how many buckets a stretch has, which model is served.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("schemathesis", reason="make test-clients installs it")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_no_answer_breaks_the_schema(url: str, tmp_path: Path) -> None:
    command = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert command is not None
    told = subprocess.run(
        [
            command,
            "run",
            f"{url}/openapi.json",
            "--checks=all",
            "--exclude-checks=positive_data_acceptance",
            "--continue-on-failure",
            "--max-examples=150",
            "--no-color",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    print(told.stdout[-2000:])
    assert told.returncode == 0, told.stdout[-20_000:] + told.stderr[-2000:]
