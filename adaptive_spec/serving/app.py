"""The ASGI application: routes around one service.  Starting and stopping the service is the caller's."""

from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from adaptive_spec.errors import SettingsError
from adaptive_spec.serving.access import AccessLog, HttpMetrics
from adaptive_spec.serving.control import control_router
from adaptive_spec.serving.dashboard.actions import actions_router
from adaptive_spec.serving.dashboard.pages import pages_router
from adaptive_spec.serving.gates import behind_gates
from adaptive_spec.serving.health import health_router
from adaptive_spec.serving.metrics import metrics_router, registry_of
from adaptive_spec.serving.openai import openai_router
from adaptive_spec.serving.origins import is_loopback
from adaptive_spec.serving.ports import Service
from adaptive_spec.serving.problems import add_handlers, described
from adaptive_spec.serving.tokens import TokenFile
from adaptive_spec.settings import ServerSettings


class _App(FastAPI):
    """Has its gates outside even what answers errors that nobody foresaw, so that no response gets around them; and
    outside of these what counts and logs every answer, refusals too."""

    def __init__(self, service: Service, answers: HttpMetrics, **options: Any) -> None:
        super().__init__(**options)
        self._service, self._answers = service, answers

    def build_middleware_stack(self) -> ASGIApp:
        return AccessLog(behind_gates(super().build_middleware_stack(), self._service), self._answers)


def create_app(service: Service) -> FastAPI:
    """Build the application for a service."""
    # The interactive docs load scripts from elsewhere, so only the schema is served.
    answers = HttpMetrics()
    app = _App(service, answers, title="adaptive-spec", docs_url=None, redoc_url=None, responses=described())
    add_handlers(app)
    for router in (openai_router, control_router, health_router, pages_router, actions_router):
        app.include_router(router(service))
    app.include_router(metrics_router(registry_of(service, answers)))
    return app


def check_bind(server: ServerSettings) -> None:
    """Refuse to listen beyond this machine without a token that may change things.

    Raises:
        SettingsError: the host is not loopback, and there is none or the file of tokens is damaged.
    """
    tokens = TokenFile(server.token_file).read()
    if not server.token and not is_loopback(server.host) and not any(token.allows("admin") for token in tokens):
        raise SettingsError(
            f"server.host {server.host} is reachable from other machines and there is no token for control routes. "
            "Make one with `adaptive-spec tokens add NAME`, set ADAPTIVE_SPEC_SERVER__TOKEN, or bind to 127.0.0.1."
        )
