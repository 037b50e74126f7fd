"""The wheel holds what an installed service needs, nothing else, and runs without the checkout.  ``make test-slow``."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]


def pip(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *words], check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


def tracked(folder: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.split())


def test_it_holds_the_package_and_the_migrations_alone(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    migrations = {name.replace("migrations/", "adaptive_spec/_migrations/", 1) for name in tracked("migrations")}
    assert names == tracked("adaptive_spec") | migrations
    assert "adaptive_spec/py.typed" in names


def test_it_carries_its_licence_and_its_command(wheel: Path) -> None:
    files = {name.split(".dist-info/")[-1]: name for name in zipfile.ZipFile(wheel).namelist()}
    assert "licenses/LICENSE" in files
    entry_points = zipfile.ZipFile(wheel).read(files["entry_points.txt"]).decode()
    assert "adaptive-spec = adaptive_spec.cli:app" in entry_points


def test_it_runs_alone(wheel: Path, tmp_path: Path) -> None:
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    pip("install", "--no-deps", "--target", installed, wheel)
    elsewhere.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "ADAPTIVE_SPEC_RECORDS__URL": f"sqlite:///{tmp_path / 'r.db'}",
    }

    def ask(*words: str) -> str:
        told = subprocess.run(
            [installed / "bin" / "adaptive-spec", *words],
            cwd=elsewhere,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return told.stdout

    assert ask("--version").strip() == wheel.name.split("-")[1]
    assert "is up to date" in ask("db", "upgrade"), "the migrations are found inside the package"
