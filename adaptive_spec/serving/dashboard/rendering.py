"""From a template and its values to a response, with the headers that every page has."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
}


def cell(value: Any) -> Any:
    """What stands in a table or a list of facts for a value; text is escaped by the template."""
    match value:
        case None | "":
            return "–"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3f}"
        case datetime():
            return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}"
        case list() | tuple():
            return ", ".join(str(cell(item)) for item in value) or "–"
        case Mapping():
            return ", ".join(f"{name} {cell(item)}" for name, item in value.items()) or "–"
    return value


def page(template: str, here: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Render a template of the folder beside this file; ``here``: the path that the navigation marks."""
    common = {"here": here, "now": cell(datetime.now(UTC)), "notice": None, "refresh": None}
    return HTMLResponse(_ENVIRONMENT.get_template(template).render(common | values), status, HEADERS)


_ENVIRONMENT = Environment(
    loader=PackageLoader("adaptive_spec.serving.dashboard"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"cell": cell, "percent": lambda value: f"{value:.0%}"}
