"""What lets a client that polls be told that nothing has changed, and one that pages find the next page."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from hashlib import sha256
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute


class ETagRoute(APIRoute):
    """Answers of GET carry an ETag, and are 304 without a body where If-None-Match names it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the route's handler."""
        handle = super().get_route_handler()

        async def tagged(request: Request) -> Response:
            response = await handle(request)
            if response.status_code != 200 or request.method != "GET":
                return response
            tag = f'W/"{sha256(bytes(response.body)).hexdigest()[:32]}"'
            response.headers.update({"ETag": tag, "Cache-Control": "private, no-cache"})
            known = {each.strip() for each in request.headers.get("if-none-match", "").split(",")}
            if not known & {tag, "*"}:
                return response
            kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
            return Response(status_code=304, headers=kept)

        return tagged


def link_next(request: Request, response: Response, rows: Sequence[Mapping[str, Any]], cursor: str, limit: int) -> None:
    """Point from a full page, newest rows first, to the next: those ``before`` its last."""
    if len(rows) == limit:
        url = request.url.include_query_params(before=rows[-1][cursor], limit=limit)
        response.headers["Link"] = f'<{url.path}?{url.query}>; rel="next"'
