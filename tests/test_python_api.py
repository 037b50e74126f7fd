"""The Python API: every name is there and loads late, and the examples of docs/python.md run as printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import adaptive_spec
from tests.process import environment_of

EXAMPLES = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "docs" / "python.md").read_text(), re.DOTALL)


def test_every_name_is_there() -> None:
    assert list(adaptive_spec.__all__) == sorted(adaptive_spec.__all__) == dir(adaptive_spec)
    for name in adaptive_spec.__all__:
        assert getattr(adaptive_spec, name).__name__ == name
    assert not hasattr(adaptive_spec, "Decoders")


def test_importing_the_package_loads_none_of_it() -> None:
    ask = "import sys, adaptive_spec; print([name for name in sys.modules if name.startswith('adaptive_spec.')])"
    assert subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("example", "told"),
    list(
        zip(EXAMPLES, [r"poems: \d of \d proposed tokens accepted", r"release 0: \d+ tokens in \d+ steps"], strict=True)
    ),
    ids=["decode", "service"],
)
def test_the_examples_run(
    example: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment_of(tmp_path)[0].items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/python.md", "exec"), {})
    assert re.search(told, capsys.readouterr().out)
