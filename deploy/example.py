"""Write deploy/adaptive-spec.toml: every setting with its default, and what docs/quickstart.md says of it.

``python -m deploy.example``; tests/test_deploy.py holds the file against what this gives.
"""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

from adaptive_spec.settings import Settings, data_dir

FILE = Path(__file__).with_name("adaptive-spec.toml")
QUICKSTART = Path(__file__).parents[1] / "docs" / "quickstart.md"
STATE = "/var/lib/adaptive-spec"  # the data folder of an installed service
HEAD = """\
# Every setting of adaptive-spec with its default.  Keep the lines that you change and delete the others: defaults may
# become better.  Lines behind a # have no default, or one that depends on where data lies on the machine.
# The environment wins over this file: ADAPTIVE_SPEC_<SECTION>__<NAME>.
"""
_ROW = re.compile(r"^\| `(?P<name>[a-z]+\.[a-z_]+)` \| .*? \| (?P<meaning>.*) \|$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


def meanings() -> dict[str, str]:
    """What each setting means, by ``section.name``, in the words of the quickstart's table."""
    return {row["name"]: row["meaning"] for row in _ROW.finditer(QUICKSTART.read_text())}


def example() -> str:
    """The text of the file."""
    parts, told = [HEAD], meanings()
    for section, tree in Settings.model_fields.items():
        parts.append(f"\n[{section}]\n")
        for name, setting in tree.annotation.model_fields.items():  # type: ignore[union-attr]
            parts.append(_comment(_LINK.sub(r"\1", told[f"{section}.{name}"])))
            parts.append(_line(name, setting.get_default(call_default_factory=True)))
    return "".join(parts)


def _comment(text: str) -> str:
    lines = textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False)
    return "".join(f"# {line}\n" for line in lines)


def _line(name: str, default: Any) -> str:
    if default is None:
        return f"# {name} =\n"
    here = str(data_dir())
    value = json.dumps(default, default=str)  # of these values JSON is TOML
    return f"{'# ' if here in value else ''}{name} = {value.replace(here, STATE)}\n"


if __name__ == "__main__":
    FILE.write_text(example())
