"""The real service in a process of its own, for real clients to talk to."""

from collections.abc import Iterator

import pytest

from tests.process import environment_of, start, stop


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where it listens.  Nothing runs by itself there, and a run needs few traces."""
    folder = tmp_path_factory.mktemp("service")
    environment, port = environment_of(
        folder, SCHEDULE__RETRAIN_HOURS=0, SCHEDULE__CALIBRATE_HOURS=0, LEARNING__MIN_TRACES=10
    )
    process = start(environment, port, folder / "log")
    yield f"http://127.0.0.1:{port}"
    stop(process)
    assert process.returncode == 0
    assert "Traceback" not in (folder / "log").read_text()
