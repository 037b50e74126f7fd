"""Every HTTP request: its id, its line in the log, its place in the metrics.  Never what it says.

The id is the client's ``X-Request-Id`` when that is short and plain, else a new one; it comes back in the same header
and is on every line that is logged for the request.
"""

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaptive_spec.serving.problems import REQUEST_ID
from adaptive_spec.telemetry.families import counter
from adaptive_spec.telemetry.logs import bind

logger = logging.getLogger(__name__)

NO_ROUTE = "none"  # label of requests that no route takes
_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_PROBES = frozenset({"/livez", "/readyz", "/metrics"})  # asked all the time: their lines are for debugging


class HttpMetrics(Collector):
    """Counts answers."""

    def __init__(self) -> None:
        self._answers: Counter[tuple[str, str, str]] = Counter()
        self._changing = threading.Lock()

    def count(self, method: str, route: str, status: int) -> None:
        """Count an answer; ``route`` is a path as it was declared, so that there are only so many."""
        with self._changing:
            self._answers[method if method in _METHODS else NO_ROUTE, route, str(status)] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the metric."""
        with self._changing:
            answers = list(self._answers.items())
        yield counter("http_requests", "Answers over HTTP.", ("method", "route", "status"), answers)


class AccessLog:
    """ASGI middleware.  Streams pass as they come; their line is written at their end."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id = _request_id(Headers(scope=scope).get(REQUEST_ID, ""))
        status, began = 500, time.perf_counter()  # what the client gets when nothing was sent: see ``problems``

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        bind(request_id=request_id)  # for good: the server, which logs faults, waits for us in this very task
        try:
            await self._app(scope, receive, tell)
        finally:
            self._note(scope, state, status, time.perf_counter() - began)

    def _note(self, scope: Scope, state: dict[str, Any], status: int, seconds: float) -> None:
        method, path = scope["method"], quote(scope["path"])  # quoted: a line stays one line
        self._metrics.count(method, getattr(scope.get("route"), "path_format", NO_ROUTE), status)
        known: dict[str, Any] = {name: state[name] for name in ("domain", "completion_id") if name in state}
        extra = {"method": method, "path": path, "status": status, "duration_seconds": round(seconds, 6), **known}
        logger.log(logging.DEBUG if path in _PROBES else logging.INFO, "answered", extra=extra)


def _request_id(given: str) -> str:
    return given if _SANE_ID.fullmatch(given) else uuid4().hex
