"""The control plane: statistics, runs, releases and thresholds over HTTP.

Who may call them, and from where, ``authorization`` and ``origins`` have seen to before.
"""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from starlette.exceptions import HTTPException

from adaptive_spec.core import ThresholdOverride
from adaptive_spec.errors import ReleaseError
from adaptive_spec.records.spans import Span
from adaptive_spec.serving import views
from adaptive_spec.serving.orders import (
    CalibrateBody,
    CanaryBody,
    ClearBody,
    OverrideBody,
    PublishBody,
    RetrainBody,
    RollbackBody,
)
from adaptive_spec.serving.ports import Service
from adaptive_spec.serving.thresholds import no_override, override_view, thresholds_view

Limit = Annotated[int, Query(ge=1, le=10_000)]
Days = Annotated[float | None, Query(ge=0, le=36_500)]


def control_router(service: Service) -> APIRouter:
    """Collect the control routes of a service."""
    router = APIRouter()
    router.include_router(_reads(service))
    router.include_router(_writes(service))
    return router


def _reads(service: Service) -> APIRouter:
    router = APIRouter(prefix="/api")

    @router.get("/domains")
    def domains() -> dict[str, Any]:
        return views.domains(service.database)

    @router.get("/stats")
    def stats(
        domain: str | None = None,
        release: int | None = None,
        policy: str | None = None,
        drafter: str | None = None,
        verifier: str | None = None,
        days: Days = None,
    ) -> dict[str, Any]:
        return views.stats(
            service.database,
            domain=domain,
            release=release,
            policy=policy,
            drafter=drafter,
            verifier=verifier,
            days=days,
        )

    @router.get("/series")
    def series(
        domain: str | None = None,
        release: int | None = None,
        policy: str | None = None,
        drafter: str | None = None,
        verifier: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        bucket: Span | None = None,
    ) -> dict[str, Any]:
        return views.series(
            service.database,
            domain=domain,
            release=release,
            policy=policy,
            drafter=drafter,
            verifier=verifier,
            since=since,
            until=until,
            bucket=bucket,
        )

    @router.get("/runs")
    def runs(limit: Limit = 20) -> dict[str, Any]:
        return views.runs(service.database, limit=limit)

    @router.get("/runs/{run_id}")
    def run(run_id: int) -> dict[str, Any]:
        found = views.run(service.database, run_id)
        if found is None:
            raise HTTPException(404, f"There is no run {run_id}. GET /api/runs lists them.")
        return found

    @router.get("/releases")
    def releases() -> dict[str, Any]:
        return views.releases(service.database)

    @router.get("/decoders")
    def decoders() -> dict[str, Any]:
        return views.decoders(service.database, gone_seconds=service.settings.cluster.gone_seconds)

    @router.get("/canary")
    def canary(limit: Limit = 20) -> dict[str, Any]:
        return views.canary(service.database, limit=limit)

    @router.get("/releases/{version}")
    def release(version: int) -> dict[str, Any]:
        try:
            return views.release(service.database, service.settings.releases.folder, version)
        except ReleaseError as error:
            raise HTTPException(404, str(error)) from error

    @router.get("/events")
    def events(limit: Limit = 50, kind: str | None = None) -> dict[str, Any]:
        return views.events(service.database, limit=limit, kind=kind)

    @router.get("/traces")
    def traces(domain: str | None = None) -> dict[str, Any]:
        return views.traces(service.database, domain=domain)

    @router.get("/drift")
    def drift() -> dict[str, Any]:
        return views.drift(service.database, service.drift_states)

    @router.get("/calibrations")
    def calibrations(domain: str | None = None, limit: Limit = 20) -> dict[str, Any]:
        return views.calibrations(service.database, domain=domain, limit=limit)

    @router.get("/divergence")
    def divergence() -> dict[str, Any]:
        return views.divergence(service.engine.budgets)

    @router.get("/thresholds")
    def thresholds() -> dict[str, Any]:
        return thresholds_view(service.database, service.engine.release)

    return router


def _writes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/api")

    @router.post("/retrain", status_code=202)
    def retrain(response: Response, body: RetrainBody | None = None) -> dict[str, int]:
        asked = body or RetrainBody()
        run_id = service.retrain(asked.trigger, resume=asked.resume, force=asked.force)
        response.headers["Location"] = f"/api/runs/{run_id}"
        return {"run_id": run_id}

    @router.post("/calibrate")
    def calibrate(body: CalibrateBody | None = None) -> dict[str, Any]:
        return {"calibrations": views.plain(service.calibrate(body.domain if body else None))}

    @router.post("/releases/rollback")
    def rollback(body: RollbackBody | None = None) -> dict[str, int]:
        wanted = body or RollbackBody()
        return {"live": service.rollback(wanted.to, wanted.reason)}

    @router.post("/canary")
    def end_canary(body: CanaryBody) -> dict[str, int]:
        return {"live": service.end_canary(body.action == "promote", body.reason)}

    @router.post("/releases/{version}/publish")
    def publish(version: int, body: PublishBody | None = None) -> dict[str, int]:
        wanted = body or PublishBody()
        return {"live": service.publish(version, wanted.reason, force=wanted.force)}

    @router.put("/thresholds/{domain:path}")
    def override(domain: str, body: OverrideBody) -> dict[str, Any]:
        numbers = ThresholdOverride(**body.model_dump(exclude={"reason", "hours"}))
        return override_view(service.override_thresholds(domain, numbers, body.reason, body.hours))

    @router.delete("/thresholds/{domain:path}")
    def clear_override(domain: str, body: ClearBody | None = None) -> dict[str, Any]:
        if not service.clear_override(domain, (body or ClearBody()).reason):
            raise HTTPException(404, no_override(domain))
        return {"cleared": domain}

    @router.delete("/traces/{request_id}")
    def forget(request_id: str) -> dict[str, Any]:
        forgotten = service.forget(request_id)
        if not forgotten.num_traces and not forgotten.num_evidence:
            raise HTTPException(404, views.nothing_stored(request_id))
        told: dict[str, Any] = views.plain(forgotten)
        return told

    return router
