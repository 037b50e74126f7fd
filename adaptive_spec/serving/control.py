"""The control plane: statistics, runs, releases and thresholds over HTTP.

Who may call them, and from where, ``authorization`` and ``origins`` have seen to before.
"""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import BeforeValidator
from starlette.exceptions import HTTPException

from adaptive_spec.core import ThresholdOverride
from adaptive_spec.errors import ReleaseError
from adaptive_spec.records.run_log import MOST_ENTRIES
from adaptive_spec.records.slices import Slice
from adaptive_spec.records.spans import Span
from adaptive_spec.serving import views
from adaptive_spec.serving.caching import ETagRoute, link_next
from adaptive_spec.serving.once import Once
from adaptive_spec.serving.orders import (
    CalibrateBody,
    CanaryBody,
    OverrideBody,
    PublishBody,
    ReasonBody,
    RetrainBody,
    RollbackBody,
)
from adaptive_spec.serving.ports import Service
from adaptive_spec.serving.problems import described
from adaptive_spec.serving.thresholds import no_override, override_view, thresholds_view


def _no_number(value: Any) -> Any:
    """Refuse seconds since 1970, which pydantic takes for a time and the schema does not promise."""
    try:
        float(value)
    except (TypeError, ValueError):
        return value
    raise ValueError("write a time as 2026-11-30T12:00:00Z")


Limit = Annotated[int, Query(ge=1, le=10_000)]
Id = Annotated[int, Path(ge=0, le=2**31 - 1)]  # as far as the database counts
Number = Annotated[int | None, Query(ge=0, le=2**31 - 1)]
Word = Annotated[str | None, Query(max_length=200, pattern=r"^[^\x00]*$")]  # PostgreSQL has no text with a zero in it
Time = Annotated[datetime | None, BeforeValidator(_no_number)]
Days = Annotated[float | None, Query(ge=0, le=36_500)]


def _about(
    domain: Word = None, release: Number = None, policy: Word = None, drafter: Word = None, verifier: Word = None
) -> Slice:
    return Slice(domain, release, policy, drafter, verifier)


About = Annotated[Slice, Depends(_about)]


def control_router(service: Service) -> APIRouter:
    """Collect the control routes of a service."""
    router = APIRouter()
    router.include_router(_reads(service))
    router.include_router(_writes(service))
    return router


def _reads(service: Service) -> APIRouter:
    router = APIRouter(prefix="/api", route_class=ETagRoute)

    @router.get("/domains")
    def domains() -> dict[str, Any]:
        return views.domains(service.database)

    @router.get("/stats")
    def stats(about: About, days: Days = None) -> dict[str, Any]:
        return views.stats(service.database, about, days=days)

    @router.get("/series")
    def series(about: About, since: Time = None, until: Time = None, bucket: Span | None = None) -> dict[str, Any]:
        return views.series(service.database, about, since=since, until=until, bucket=bucket)

    @router.get("/runs")
    def runs(
        request: Request,
        response: Response,
        limit: Limit = 20,
        state: Word = None,
        trigger: Word = None,
        before: Number = None,
    ) -> dict[str, Any]:
        found = views.runs(service.database, limit=limit, state=state, trigger=trigger, before=before)
        link_next(request, response, found["runs"], "id", limit)
        return found

    @router.get("/runs/{run_id}", responses=described(404))
    def run(run_id: Id) -> dict[str, Any]:
        found = views.run(service.database, run_id)
        if found is None:
            raise HTTPException(404, f"There is no run {run_id}. GET /api/runs lists them.")
        return found

    @router.get("/runs/{run_id}/log", responses=described(404))
    def run_log(run_id: Id, limit: Annotated[int, Query(ge=1, le=MOST_ENTRIES)] = 200) -> dict[str, Any]:
        run(run_id)
        return views.run_log(service.database, run_id, limit=limit)

    @router.get("/releases")
    def releases(
        request: Request, response: Response, limit: Limit = 100, state: Word = None, before: Number = None
    ) -> dict[str, Any]:
        found = views.releases(service.database, limit=limit, state=state, before=before)
        link_next(request, response, found["releases"], "version", limit)
        return found

    @router.get("/decoders")
    def decoders() -> dict[str, Any]:
        return views.decoders(service.database, gone_seconds=service.settings.cluster.gone_seconds)

    @router.get("/canary")
    def canary(limit: Limit = 20) -> dict[str, Any]:
        return views.canary(service.database, limit=limit)

    @router.get("/releases/{version:int}", responses=described(404))
    def release(version: Id) -> dict[str, Any]:
        try:
            return views.release(service.database, service.settings.releases.folder, version)
        except ReleaseError as error:
            raise HTTPException(404, str(error)) from error

    @router.get("/events")
    def events(
        request: Request,
        response: Response,
        limit: Limit = 50,
        kind: Word = None,
        domain: Word = None,
        release: Number = None,
        before: Number = None,
    ) -> dict[str, Any]:
        found = views.events(service.database, limit=limit, kind=kind, domain=domain, release=release, before=before)
        link_next(request, response, found["events"], "id", limit)
        return found

    @router.get("/traces")
    def traces(domain: Word = None) -> dict[str, Any]:
        return views.traces(service.database, domain=domain)

    @router.get("/drift")
    def drift() -> dict[str, Any]:
        return views.drift(service.database, service.drift_states)

    @router.get("/calibrations")
    def calibrations(domain: Word = None, limit: Limit = 20) -> dict[str, Any]:
        return views.calibrations(service.database, domain=domain, limit=limit)

    @router.get("/divergence")
    def divergence() -> dict[str, Any]:
        return views.divergence(service.engine.budgets)

    @router.get("/settings")
    def settings() -> dict[str, Any]:
        return service.settings.in_effect()

    @router.get("/thresholds")
    def thresholds() -> dict[str, Any]:
        return thresholds_view(service.database, service.engine.release)

    return router


def _writes(service: Service) -> APIRouter:
    def keyed(idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None) -> Once:
        return Once(service.database, idempotency_key)

    Keyed = Annotated[Once, Depends(keyed)]
    router = APIRouter(prefix="/api", responses=described(401, 403, 409))

    @router.post("/retrain", status_code=202)
    def retrain(response: Response, once: Keyed, body: RetrainBody | None = None) -> dict[str, Any]:
        asked = body or RetrainBody()

        def begin() -> dict[str, Any]:
            return {"run_id": service.retrain(asked.trigger, resume=asked.resume, force=asked.force)}

        told = once("retrain", asked, begin)
        response.headers["Location"] = f"/api/runs/{told['run_id']}"
        return told

    @router.post("/runs/{run_id}/cancel", status_code=202, responses=described(404))
    def cancel(run_id: Id, response: Response, body: ReasonBody | None = None) -> dict[str, Any]:
        if views.run(service.database, run_id) is None:
            raise HTTPException(404, f"There is no run {run_id}. GET /api/runs lists them.")
        state = service.cancel_run(run_id, (body or ReasonBody()).reason)
        response.headers["Location"] = f"/api/runs/{run_id}"
        return {"run_id": run_id, "state": state}

    @router.post("/calibrate")
    def calibrate(once: Keyed, body: CalibrateBody | None = None) -> dict[str, Any]:
        asked = body or CalibrateBody()
        return once("calibrate", asked, lambda: {"calibrations": views.plain(service.calibrate(asked.domain))})

    @router.post("/releases/rollback")
    def rollback(once: Keyed, body: RollbackBody | None = None) -> dict[str, Any]:
        wanted = body or RollbackBody()
        return once("rollback", wanted, lambda: {"live": service.rollback(wanted.to, wanted.reason)})

    @router.post("/canary")
    def end_canary(body: CanaryBody) -> dict[str, int]:
        return {"live": service.end_canary(body.action == "promote", body.reason)}

    @router.post("/releases/{version:int}/publish")
    def publish(version: Id, once: Keyed, body: PublishBody | None = None) -> dict[str, Any]:
        wanted = body or PublishBody()

        def put_live() -> dict[str, Any]:
            return {"live": service.publish(version, wanted.reason, force=wanted.force)}

        return once(f"publish {version}", wanted, put_live)

    @router.put("/thresholds/{domain:path}")
    def override(domain: str, body: OverrideBody) -> dict[str, Any]:
        numbers = ThresholdOverride(**body.model_dump(exclude={"reason", "hours"}))
        return override_view(service.override_thresholds(domain, numbers, body.reason, body.hours))

    @router.delete("/thresholds/{domain:path}", responses=described(404))
    def clear_override(domain: str, body: ReasonBody | None = None) -> dict[str, Any]:
        if not service.clear_override(domain, (body or ReasonBody()).reason):
            raise HTTPException(404, no_override(domain))
        return {"cleared": domain}

    @router.delete("/traces/{request_id}", responses=described(404))
    def forget(request_id: str) -> dict[str, Any]:
        forgotten = service.forget(request_id)
        if not forgotten.num_traces and not forgotten.num_evidence:
            raise HTTPException(404, views.nothing_stored(request_id))
        told: dict[str, Any] = views.plain(forgotten)
        return told

    return router
