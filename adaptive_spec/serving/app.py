"""The ASGI application: routes around one service.  Starting and stopping the service is the caller's."""

import ipaddress

from fastapi import FastAPI

from adaptive_spec.errors import SettingsError
from adaptive_spec.serving.control import control_router
from adaptive_spec.serving.metrics import metrics_router
from adaptive_spec.serving.openai import openai_router
from adaptive_spec.serving.page import page_router
from adaptive_spec.serving.ports import Service
from adaptive_spec.serving.problems import add_handlers, described
from adaptive_spec.settings import ServerSettings


def create_app(service: Service) -> FastAPI:
    """Build the application for a service."""
    # The interactive docs load scripts from elsewhere, so only the schema is served.
    app = FastAPI(title="adaptive-spec", docs_url=None, redoc_url=None, responses=described())
    add_handlers(app)
    for router in (openai_router(service), control_router(service), metrics_router(service), page_router(service)):
        app.include_router(router)
    return app


def check_bind(server: ServerSettings) -> None:
    """Refuse to listen beyond this machine without a token.

    Raises:
        SettingsError: the host is not loopback and no token is set.
    """
    if not server.token and not _is_loopback(server.host):
        raise SettingsError(
            f"server.host {server.host} is reachable from other machines and server.token is empty. "
            "Set ADAPTIVE_SPEC_SERVER__TOKEN, or bind to 127.0.0.1."
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
