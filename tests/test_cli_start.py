"""Help is there at once: what asks for none of it loads neither torch nor the database's libraries."""

import json
import os
import subprocess
import sys

HEAVY = {"alembic", "fastapi", "httpx2", "numpy", "pydantic_settings", "scipy", "sqlalchemy", "torch", "transformers"}
# What typer itself needs to read the flags of a group, and urllib to call a service, is not needed to print a list.
HEAVIER_THAN_A_LIST = HEAVY | {"pydantic", "urllib.request"}

ASK = """
import json, sys
from typer.main import get_command
from typer.testing import CliRunner
from adaptive_spec.cli import app

def ask(*words):
    answer = CliRunner().invoke(app, [*words, "--help"])
    assert answer.exit_code == 0 and "Usage" in answer.output, answer.output
    return sorted(sys.modules)

def walk(group, *words):
    for name, command in group.commands.items():
        loaded[" ".join((*words, name))] = ask(*words, name)
        if hasattr(command, "commands"):
            walk(command, *words, name)

loaded = {"": ask()}
walk(get_command(app))
print(json.dumps(loaded))
"""


def test_help_loads_nothing_heavy() -> None:
    answer = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, env=os.environ, check=True)
    loaded = {command: set(modules) for command, modules in json.loads(answer.stdout).items()}
    assert {"", "serve", "db", "db prune", "releases show", "demo"} <= set(loaded)
    for command, modules in loaded.items():
        assert not modules & HEAVY, f"adaptive-spec {command} --help"
    assert not loaded[""] & HEAVIER_THAN_A_LIST
