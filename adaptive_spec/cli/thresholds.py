"""``adaptive-spec thresholds``: the numbers in force, and those that a person sets in their place."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from adaptive_spec.cli.apps import thresholds_app
from adaptive_spec.cli.asking import ask, service_at, tell
from adaptive_spec.cli.options import Csv, Domain, Json, Token, Url
from adaptive_spec.cli.output import pairs, say, show
from adaptive_spec.errors import AdaptiveSpecError

if TYPE_CHECKING:
    from adaptive_spec.records.database import Database

_NUMBERS = ("temperature", "offset", "warmth", "stop_below", "max_chain_length", "sampling_temperature")
Of = Annotated[str, typer.Argument(metavar="DOMAIN", help="The domain; *: every one without an override of its own.")]


@thresholds_app.callback()
def thresholds(
    ctx: typer.Context, domain: Domain = None, url: Url = None, json_: Json = False, csv_: Csv = False
) -> None:
    """The numbers that each domain is drafted under, and where each comes from."""
    if ctx.invoked_subcommand is not None:
        return
    found = ask(url, "/api/thresholds", {}, _direct)
    shown = {"*": found["fallback"], **found["thresholds"]}
    rows = [
        {"domain": name, "number": number, "value": shown[name][number], "source": _told(sources[number])}
        for name, sources in sorted(found["sources"].items())
        for number in _NUMBERS
        if domain in (None, name)
    ]
    show(found, rows, ("domain", "number", "value", "source"), json_, csv_)


@thresholds_app.command("list")
def thresholds_list(url: Url = None, json_: Json = False, csv_: Csv = False) -> None:
    """What persons have set that is in force, why, and until when."""
    found = ask(url, "/api/thresholds", {}, _direct)
    show(found, found["overrides"], ("domain", "numbers", "until", "reason"), json_, csv_)


@thresholds_app.command("set")
def thresholds_set(
    domain: Of,
    reason: Annotated[str, typer.Option(help="Why; kept as an event.")],
    temperature: Annotated[float | None, typer.Option(help="What the draft's log-odds are divided by.")] = None,
    offset: Annotated[float | None, typer.Option(help="What is added to them.")] = None,
    warmth: Annotated[float | None, typer.Option(help="What a request's own temperature adds.")] = None,
    stop_below: Annotated[
        float | None, typer.Option(help="Drafting stops below this probability of acceptance.")
    ] = None,
    max_chain_length: Annotated[
        int | None, typer.Option(min=0, help="Tokens of a chain at most; 0: no speculation.")
    ] = None,
    hours: Annotated[float | None, typer.Option(help="After which it ends; without it, the setting's.")] = None,
    url: Url = None,
    token: Token = "",
    json_: Json = False,
) -> None:
    """Set numbers of a domain by hand, for a time: adaptive-spec thresholds set code --stop-below 0.6 --reason slow"""
    numbers = {
        "temperature": temperature,
        "offset": offset,
        "warmth": warmth,
        "stop_below": stop_below,
        "max_chain_length": max_chain_length,
    }

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.calibration.override import override_by_hand
        from adaptive_spec.core import ThresholdOverride
        from adaptive_spec.serving.thresholds import override_view
        from adaptive_spec.settings import load_settings

        wanted = ThresholdOverride(**numbers)  # type: ignore[arg-type]
        return override_view(override_by_hand(database, load_settings(), domain, wanted, reason, hours))

    body = {**numbers, "reason": reason, "hours": hours}
    found = tell(url, lambda: service_at(url, token).put(_path(domain), body), direct)
    say(found, f"{pairs(found['numbers'])} for {domain} until {found['until']}.", json_)


@thresholds_app.command("clear")
def thresholds_clear(
    domain: Of,
    reason: Annotated[str, typer.Option(help="What is recorded as the reason.")] = "asked for",
    url: Url = None,
    token: Token = "",
    json_: Json = False,
) -> None:
    """Give a domain its release's numbers back before the override expires."""

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.records.overrides import clear_override
        from adaptive_spec.serving.thresholds import no_override

        if not clear_override(database, domain, reason):
            raise AdaptiveSpecError(no_override(domain))
        return {"cleared": domain}

    found = tell(url, lambda: service_at(url, token).delete(_path(domain), {"reason": reason}), direct)
    say(found, f"{domain} has its release's numbers.", json_)


def _path(domain: str) -> str:
    from urllib.parse import quote

    return f"/api/thresholds/{quote(domain)}"


def _told(source: dict[str, Any]) -> str:
    """Where a number comes from, in words."""
    of = " (all domains)" if source.get("domain") == "*" else ""
    if source["source"] == "override":
        return f"override{of} until {source['until']}: {source['reason']}"
    if source["source"] == "calibration":
        return f"calibration of {source['at']}, release {source['release']}{of}"
    return f"release {source['release']}{of}" if source["source"] == "release" else "default"


def _direct(database: "Database") -> dict[str, Any]:
    from adaptive_spec.releases.registry import live_release
    from adaptive_spec.serving.thresholds import thresholds_view
    from adaptive_spec.settings import load_settings

    return thresholds_view(database, live_release(database, load_settings().releases.folder))
