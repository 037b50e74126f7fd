"""What the decoding tests share."""

import pytest

from tests.decoding.heard import Heard


@pytest.fixture
def heard() -> Heard:
    return Heard()
