"""The settings in effect, where each comes from, and nothing that is secret."""

import re
from typing import Any

from adaptive_spec.settings import Settings

_HIDDEN = "***"


def in_effect(settings: Settings) -> dict[str, Any]:
    """All settings, and the source of each that is not the default: ``file``, ``environment`` or ``flag``."""
    shown = settings.model_dump(mode="json")
    shown["records"]["url"] = without_password(shown["records"]["url"])
    shown["releases"]["store"] = without_password(shown["releases"]["store"])
    shown["server"]["token"] = _HIDDEN if shown["server"]["token"] else ""
    return {"settings": shown, "sources": settings.sources}


def without_password(url: str) -> str:
    """A URL whose password, if it has one, is not legible."""
    return re.sub(r"://([^:/@]*):[^@]*@", rf"://\1:{_HIDDEN}@", url)
