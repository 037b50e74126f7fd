"""The probes: does the process answer, does it take requests, which version is it."""

import platform
import time
from typing import Any

from fastapi import APIRouter, Response

from adaptive_spec.serving.ports import Service
from adaptive_spec.version import package_version


def health_router(service: Service) -> APIRouter:
    """Collect the probes of a service."""
    router = APIRouter()

    @router.get("/livez")
    def livez() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/readyz")
    def readyz(response: Response) -> dict[str, Any]:
        missing = not_ready(service)
        if missing:
            response.status_code = 503
        return {"status": "not ready" if missing else "ok", "not_ready": missing, "degraded": degraded(service)}

    @router.get("/version")
    def version() -> dict[str, str]:
        return {"version": package_version(), "python": platform.python_version()}

    return router


def not_ready(service: Service) -> dict[str, str]:
    """Why no requests are taken: part -> what is the matter.  Empty: they are."""
    found = {}
    if not service.ready:
        found["service"] = "It is starting, or takes no more requests because it stops."
    if not service.engine.alive:
        found["decoder"] = "Its thread has ended; the log says why. Restart the service."
    return found


def degraded(service: Service) -> dict[str, str]:
    """What does not work although requests are decoded: part -> what is the matter."""
    if database_answers(service):
        return {}
    last = service.last_sign
    since = "yet" if last is None else f"for {time.time() - last:.0f} s"
    return {"database": f"No sign of life has reached it {since}. Nothing is learned; records wait, then are dropped."}


def database_answers(service: Service) -> bool:
    """Whether this process's signs of life reach the database: no other process holds it for gone, then."""
    last = service.last_sign
    return last is not None and time.time() - last <= service.settings.cluster.gone_seconds
