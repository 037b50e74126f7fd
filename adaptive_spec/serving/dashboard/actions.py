"""What the dashboard's buttons do: forms that a person has filled in and confirmed.

They change something, so they need a token and their own origin as every such route does (``access``, ``origins``).
"""

from collections.abc import Callable
from typing import Annotated
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, Form
from fastapi.responses import RedirectResponse, Response
from starlette.exceptions import HTTPException

from adaptive_spec.core import ThresholdOverride
from adaptive_spec.errors import AdaptiveSpecError
from adaptive_spec.serving.dashboard.rendering import page
from adaptive_spec.serving.ports import Service
from adaptive_spec.serving.problems import status_of

Reason = Annotated[str, Form(min_length=1, max_length=500)]


def actions_router(service: Service) -> APIRouter:
    """Serve the forms of a service."""
    router = APIRouter(prefix="/actions", include_in_schema=False, dependencies=[Depends(_confirmed)])

    @router.post("/retrain")
    def retrain(force: Annotated[str, Form()] = "") -> Response:
        return _done("/", lambda: f"Run {service.retrain('person', force=force == 'yes')} was asked for.")

    @router.post("/calibrate")
    def calibrate(domain: Annotated[str | None, Form()] = None) -> Response:
        back = _page_of(domain) if domain else "/"
        return _done(back, lambda: f"{len(service.calibrate(domain))} calibrations were made.")

    @router.post("/rollback")
    def rollback(to: Annotated[int, Form(ge=0)], reason: Reason) -> Response:
        return _done("/", lambda: f"Release {service.rollback(to, reason)} is live.")

    @router.post("/canary")
    def canary(action: Annotated[str, Form(pattern="^(promote|abort)$")], reason: Reason) -> Response:
        return _done("/", lambda: f"Release {service.end_canary(action == 'promote', reason)} is live.")

    @router.post("/thresholds/set")
    def override(
        domain: Annotated[str, Form()],
        reason: Reason,
        hours: Annotated[float, Form(gt=0)],
        stop_below: Annotated[float | None, Form()] = None,
        max_chain_length: Annotated[int | None, Form()] = None,
    ) -> Response:
        def do() -> str:
            numbers = ThresholdOverride(stop_below=stop_below, max_chain_length=max_chain_length)
            record = service.override_thresholds(domain, numbers, reason, hours)
            return f"{domain} is set by hand until {record.until:%Y-%m-%d %H:%M} UTC."

        return _done(_page_of(domain), do)

    @router.post("/thresholds/clear")
    def clear(domain: Annotated[str, Form()], reason: Reason) -> Response:
        def do() -> str:
            found = service.clear_override(domain, reason)
            return f"{domain} has its release's numbers again." if found else f"Nothing was set by hand for {domain}."

        return _done(_page_of(domain), do)

    return router


def _confirmed(confirmed: Annotated[str, Form()] = "") -> None:
    if confirmed != "yes":
        raise HTTPException(400, "Tick the box that says what will happen, and send the form again.")


def _done(back: str, do: Callable[[], str]) -> Response:
    """Do it and go back to a page that says so; or say why it could not be done."""
    try:
        said = do()
    except AdaptiveSpecError as error:
        status, _ = status_of(error)
        return page("problem.html", "", status, heading=f"Error {status}", message=str(error), back=back)
    return RedirectResponse(f"{back}?{urlencode({'notice': said})}", 303)


def _page_of(domain: str) -> str:
    return f"/domains/{quote(domain)}"
