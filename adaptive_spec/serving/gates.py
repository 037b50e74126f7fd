"""What every request passes before a route sees it, and every response on its way back: the last below comes first."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from adaptive_spec.serving.authorization import Authorization
from adaptive_spec.serving.bodysize import BodySize
from adaptive_spec.serving.headers import SecurityHeaders
from adaptive_spec.serving.keyring import Keyring
from adaptive_spec.serving.limits import Limits
from adaptive_spec.serving.origins import Origins
from adaptive_spec.serving.ports import Service


def behind_gates(app: ASGIApp, service: Service) -> ASGIApp:
    """Put the gates in front of an application."""
    server, limits = service.settings.server, service.settings.limits
    app = BodySize(app, limits)
    app = Limits(app, limits)
    app = Authorization(app, service, Keyring(server.token_file))
    if server.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=server.allowed_origins,
            allow_methods=("GET", "POST", "PUT", "DELETE"),
            allow_headers=(
                "Authorization",
                "Content-Type",
                "Idempotency-Key",
                "If-None-Match",
                "X-Domain",
                "X-Request-Id",
            ),
            expose_headers=("ETag", "Link", "Location", "Retry-After", "X-Request-Id"),
        )
    return SecurityHeaders(Origins(app, server))
