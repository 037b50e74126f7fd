"""Docs are under test: every setting is documented with its default's section, every link leads somewhere."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.main import get_command

from adaptive_spec.cli import app
from adaptive_spec.settings import Settings

ROOT = Path(__file__).parent.parent
METRICS = set(
    re.findall(r"^\| `(adaptive_spec_[a-z_]+)`", (ROOT / "docs" / "observability.md").read_text(), re.MULTILINE)
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "quickstart.md").read_text()
    documented = set(re.findall(r"^\| `([a-z]+\.[a-z_]+)`", text, re.MULTILINE))
    real = {
        f"{section}.{name}"
        for section, field in Settings.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        for name in field.annotation.model_fields
    }
    assert documented == real


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_that_the_readme_names_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert named <= targets


GUIDES = [ROOT / "docs" / name for name in ("concepts.md", "deployment.md", "index.md", "python.md")]
GUIDES += sorted((ROOT / "docs" / "cookbook").glob("*.md"))


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_what_guides_name_exists(page: Path) -> None:
    text = page.read_text()
    sections = {section: set(tree.annotation.model_fields) for section, tree in Settings.model_fields.items()}
    for section, name in re.findall(rf"`({'|'.join(sections)})\.([a-z_]+)", text):
        assert name in sections[section], f"{section}.{name}"
    for table in re.findall(r"```toml\n(.*?)```", text, re.DOTALL):
        for section, values in tomllib.loads(table).items():
            assert set(values) <= sections[section], section
    assert set(re.findall(r"`(adaptive_spec_[a-z_]+)`", text)) <= METRICS
    for line in re.findall(r"(?:^ *|`)(?:\S*/)?adaptive-spec ([a-z-]+[^`\n]*)", text, re.MULTILINE):
        command: Any = get_command(app)
        flags = re.findall(r"--[a-z-]+", line.split(" #")[0])
        for word in line.split():
            command = getattr(command, "commands", {}).get(word) or command
        assert command.name == line.split()[0] or line.split()[1] == command.name, line
        known = {spelling for option in command.params for spelling in (*option.opts, *option.secondary_opts)}
        assert set(flags) <= known, line


def test_every_page_of_the_site_is_in_its_navigation() -> None:
    named = re.findall(r"(?:- |: )([a-z0-9/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES[1:])
