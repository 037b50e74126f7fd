"""GET /: the state of the service on one page, rendered here, with nothing loaded from elsewhere."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from adaptive_spec.releases.report import verdict
from adaptive_spec.serving import views
from adaptive_spec.serving.ports import Engine, Service
from adaptive_spec.serving.progress import own_adapters_line, progress_line

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
STYLE = """
:root { color-scheme: light dark; --line: #d5d8dd; --soft: #5c6470; --bar: #2f6fde; }
@media (prefers-color-scheme: dark) { :root { --line: #3a3f47; --soft: #9aa3af; --bar: #7aa7ff; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
.facts { color: var(--soft); } .facts b { color: var(--bar); }
"""
DOMAIN_COLUMNS = (
    ("domain", "Domain"),
    ("num_requests", "Requests"),
    ("num_cached_requests", "Cached"),
    ("num_spec_steps", "Steps"),
    ("draft_acceptance_rate", "Acceptance rate"),
    ("mean_acceptance_length", "Tokens per step"),
    ("tokens_per_second", "Tokens per second"),
)
RUN_COLUMNS = (
    ("id", "Run"),
    ("trigger", "Trigger"),
    ("state", "State"),
    ("created_at", "Asked for at"),
    ("progress", "Progress"),
    ("own_adapters", "Own adapters"),
)
DECODER_COLUMNS = (
    ("host", "Host"),
    ("pid", "Process"),
    ("role", "Role"),
    ("release", "Release"),
    ("state", "State"),
    ("age_seconds", "Seconds since its last sign"),
)
RELEASE_COLUMNS = (
    ("version", "Release"),
    ("state", "State"),
    ("gate", "Gate"),
    ("goodput", "Goodput"),
    ("parent", "Parent"),
    ("created_at", "Written at"),
)


def page_router(service: Service) -> APIRouter:
    """Serve the page of a service."""
    router = APIRouter()

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    def page() -> HTMLResponse:
        return HTMLResponse(render(service), headers=HEADERS)

    return router


def render(service: Service) -> str:
    """Render the page."""
    engine, database = service.engine, service.database
    gone = service.settings.cluster.gone_seconds
    facts = (
        f"{escape(service.settings.model.target)} · live release <b>{engine.release.version}</b>{_trial(engine)} · "
        f"{engine.num_active} active · {engine.queue_depth} queued · {service.writer.num_dropped} records dropped"
    )
    return "".join(
        (
            "<!doctype html><html lang=en><head><meta charset=utf-8><title>adaptive-spec</title>",
            "<meta name=viewport content='width=device-width'><meta http-equiv=refresh content=15>",
            f"<style>{STYLE}</style></head><body><main><h1>adaptive-spec</h1><p class=facts>{facts}</p>",
            _section("Domains", DOMAIN_COLUMNS, views.stats(database)["domains"]),
            _section("Releases", RELEASE_COLUMNS, _with_gate(views.releases(database)["releases"])),
            _section("Decoders", DECODER_COLUMNS, views.decoders(database, gone_seconds=gone)["decoders"]),
            _section("Runs", RUN_COLUMNS, _with_lines(views.runs(database)["runs"])),
            "</main></body></html>",
        )
    )


def _trial(engine: Engine) -> str:
    """The release on trial, and what exchanges of releases have cost."""
    canary = f", release <b>{engine.canary.version}</b> on trial" if engine.canary else ""
    pauses = engine.pauses
    paused = f", longest swap pause {pauses.longest_seconds * 1e3:.1f} ms" if pauses.num_swaps else ""
    return canary + paused


def _with_lines(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            **run,
            "progress": progress_line(run["progress"]),
            "own_adapters": own_adapters_line(run["report"].get("own_adapters", ())),
        }
        for run in runs
    ]


def _with_gate(releases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each with the gate's verdict, and what it said of the goodput."""
    return [
        {
            **release,
            "gate": verdict(release["report"]),
            "goodput": next((c["reason"] for c in release["report"].get("checks", ()) if c["name"] == "goodput"), None),
        }
        for release in releases
    ]


def _section(title: str, columns: Sequence[tuple[str, str]], rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return f"<h2>{title}</h2><p class=facts>None yet.</p>"
    head = _cells("th scope=col", (label for _, label in columns))
    body = "".join(f"<tr>{_cells('td', (_text(row.get(name)) for name, _ in columns))}</tr>" for row in rows)
    return f"<h2>{title}</h2><div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag.split()[0]}>" for text in texts)


def _text(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
