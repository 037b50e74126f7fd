"""The control plane: statistics, runs, releases and thresholds over HTTP.

Who may call them, and from where, ``authorization`` and ``origins`` have seen to before.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from adaptive_spec.errors import ReleaseError
from adaptive_spec.serving import views
from adaptive_spec.serving.bodies import Text
from adaptive_spec.serving.ports import Service

Limit = Annotated[int, Query(ge=1, le=10_000)]
Days = Annotated[float | None, Query(ge=0, le=36_500)]
Words = Annotated[Text, Field(pattern=r"^[^\x00]*$")]  # what databases can store


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RetrainBody(_Body):
    """Why the run is asked for; ``force``: also with too little data; ``resume``: go on with the interrupted one."""

    trigger: Words = Field(default="person", min_length=1, max_length=64)
    resume: bool = False
    force: bool = False


class CalibrateBody(_Body):
    """Which domain to refit; None: all."""

    domain: Words | None = None


class RollbackBody(_Body):
    """Which release to put live; None: the parent of the live one."""

    to: int | None = Field(default=None, ge=0)
    reason: Words = Field(default="asked for", max_length=500)


class CanaryBody(_Body):
    """What becomes of the release on trial."""

    action: Literal["promote", "abort"]
    reason: Words = Field(default="asked for", max_length=500)


class PublishBody(_Body):
    """Why this release goes live; ``force``: also over the gate's refusal, and then a reason is needed."""

    reason: Words = Field(default="", max_length=500)
    force: bool = False


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
    def series(domain: str | None = None, limit: Limit = 500) -> dict[str, Any]:
        return views.series(service.database, domain=domain, limit=limit)

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
        return views.thresholds(service.engine.release)

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

    @router.delete("/traces/{request_id}")
    def forget(request_id: str) -> dict[str, Any]:
        forgotten = service.forget(request_id)
        if not forgotten.num_traces and not forgotten.num_evidence:
            raise HTTPException(404, views.nothing_stored(request_id))
        told: dict[str, Any] = views.plain(forgotten)
        return told

    return router
