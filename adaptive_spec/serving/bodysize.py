"""How large a request's body may be, and how long it may take to arrive."""

import anyio
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaptive_spec.serving.problems import refusal
from adaptive_spec.settings import LimitSettings


class BodySize:
    """Refuses a body that is announced too large at once, and stops reading one that turns out to be."""

    def __init__(self, app: ASGIApp, limits: LimitSettings) -> None:
        self._app = app
        self._most = limits.body_bytes
        self._seconds = limits.body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if self._most and announced.isdecimal() and int(announced) > self._most:
            await refusal(413, self._too_large())(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _bounded(self, receive: Receive) -> Receive:
        num_bytes = 0
        whole = False
        deadline = anyio.current_time() + self._seconds if self._seconds else float("inf")

        async def bounded() -> Message:
            nonlocal num_bytes, whole
            if whole:  # what comes now is the client going away, whenever that is
                return await receive()
            with anyio.CancelScope(deadline=deadline):
                message = await receive()
                num_bytes += len(message.get("body", b""))
                whole = not message.get("more_body", False)
                # Raised through the route, whose handlers write the envelope.
                if self._most and num_bytes > self._most:
                    raise HTTPException(413, self._too_large())
                return message
            raise HTTPException(408, f"The body did not arrive in {self._seconds:g} seconds. Send it again.")

        return bounded

    def _too_large(self) -> str:
        return f"The body is larger than {self._most} bytes. Send less, or raise limits.body_bytes."
