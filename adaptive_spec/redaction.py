"""Secrets are taken out of whatever is shown: settings, errors, logs.  Anybody may call this; it knows no setting."""

import re
from typing import Any

MASK = "***"
_USER_INFO = re.compile(r"(/[^:/@\s\"']*):[^\s\"']*@")  # up to the last @, since passwords hold unescaped ones
_NAMED = re.compile(
    r"(?i)([\w-]*(?:password|passwd|secret|token|signature|api[_-]?key|access[_-]?key)[\w-]*=)[^&\s\"']+"
)


def hide_secrets(text: str) -> str:
    """Replace passwords in URLs and the values of ``password=`` and its like."""
    return _NAMED.sub(rf"\1{MASK}", _USER_INFO.sub(rf"\1:{MASK}@", text))


def hide_all(value: Any) -> Any:
    """Do so in every text of a tree of JSON."""
    if isinstance(value, dict):
        return {name: hide_all(item) for name, item in value.items()}
    if isinstance(value, list):
        return [hide_all(item) for item in value]
    return hide_secrets(value) if isinstance(value, str) else value
