"""``adaptive-spec runs``: training runs, what they told, and their end before its time."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from adaptive_spec.cli.apps import runs_app
from adaptive_spec.cli.asking import ask, service_at, tell
from adaptive_spec.cli.options import Before, Csv, Json, Limit, Token, Url
from adaptive_spec.cli.output import pairs, say, show
from adaptive_spec.serving.progress import own_adapters_line, progress_line

if TYPE_CHECKING:
    from adaptive_spec.records.database import Database

Run = Annotated[int, typer.Argument(min=1, metavar="RUN", help="The run's number.")]


@runs_app.callback()
def runs(
    ctx: typer.Context,
    state: Annotated[str | None, typer.Option(help="Only in this state, such as failed.")] = None,
    before: Before = None,
    limit: Limit = 20,
    url: Url = None,
    json_: Json = False,
    csv_: Csv = False,
) -> None:
    """The latest training runs."""
    if ctx.invoked_subcommand is not None:
        return
    query: dict[str, Any] = {"limit": limit, "state": state, "before": before}

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views

        return views.runs(database, **query)

    found = ask(url, "/api/runs", query, direct)
    rows = [
        {
            **run,
            "progress": progress_line(run.get("progress") or {}),
            "own_adapters": own_adapters_line((run.get("report") or {}).get("own_adapters") or ()),
        }
        for run in found["runs"]
    ]
    columns = ("id", "trigger", "state", "created_at", "finished_at", "progress", "own_adapters", "release", "error")
    show(found, rows, columns, json_, csv_)


@runs_app.command("log")
def runs_log(
    run: Run,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1_000, help="At most so many entries, the latest.")] = 200,
    url: Url = None,
    json_: Json = False,
    csv_: Csv = False,
) -> None:
    """What a run told: its states, its progress, and what its processes printed."""

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.records.runs import get_run
        from adaptive_spec.serving import views

        return views.run_log(database, get_run(database, run).id, limit=limit)

    found = ask(url, f"/api/runs/{run}/log", {"limit": limit}, direct)
    rows = [
        {"at": entry["at"], "kind": entry["kind"], "said": line} for entry in found["entries"] for line in _lines(entry)
    ]
    show(found, rows, ("at", "kind", "said"), json_, csv_)


@runs_app.command("cancel")
def runs_cancel(
    run: Run,
    reason: Annotated[str, typer.Option(help="What is recorded as the reason.")] = "asked for",
    url: Url = None,
    token: Token = "",
    json_: Json = False,
) -> None:
    """End a run, whichever process runs it: adaptive-spec runs cancel 12 --reason "wrong data"."""

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.records.runs import cancel_run

        return {"run_id": run, "state": cancel_run(database, run, reason)}

    found = tell(url, lambda: service_at(url, token).post(f"/api/runs/{run}/cancel", {"reason": reason}), direct)
    ended = found["state"] == "cancelled"
    say(found, f"Run {run} {'is cancelled' if ended else 'is told to end'}.", json_)


def _lines(entry: dict[str, Any]) -> list[str]:
    detail: dict[str, Any] = entry["detail"]
    if entry["kind"] == "output":
        return list(detail["lines"])
    return [progress_line(detail) if entry["kind"] == "progress" else pairs(detail)]
