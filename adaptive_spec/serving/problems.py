"""Errors as HTTP: one envelope, the one that OpenAI clients parse."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from adaptive_spec.errors import (
    AdaptiveSpecError,
    BusyError,
    DeadlineError,
    NotEnoughDataError,
    NotLeaderError,
    OrderConflict,
    OwnDeadlineError,
    RateLimitError,
    RecordsError,
    ReleaseError,
    RequestError,
    RunError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

METHODS = ("DELETE", "GET", "POST", "PUT")  # of all routes
REQUEST_ID = "X-Request-Id"  # header of every answer

STATUS: tuple[tuple[type[AdaptiveSpecError], int, str], ...] = (
    (RequestError, 400, "invalid_request_error"),
    (BusyError, 429, "rate_limit_error"),
    (NotEnoughDataError, 409, "conflict_error"),
    (NotLeaderError, 409, "conflict_error"),
    (OrderConflict, 409, "conflict_error"),
    (ReleaseError, 409, "conflict_error"),
    (RunError, 409, "conflict_error"),
    (RecordsError, 503, "service_unavailable_error"),
    (UnavailableError, 503, "service_unavailable_error"),
    (OwnDeadlineError, 408, "timeout_error"),
    (DeadlineError, 504, "timeout_error"),
)
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
}


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Problem(BaseModel):
    """The body of every error."""

    error: ErrorDetail


MEANINGS = {
    401: "the token is missing or wrong",
    403: "a page of another origin asked",
    404: "there is no such thing",
    409: "it cannot be done now, or no more; the message says why",
    429: "too much at once; Retry-After says when to try again",
}


def described(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What the schema says of errors, those of every route and these."""
    found: dict[int | str, dict[str, Any]] = {status: {"description": MEANINGS[status]} for status in statuses}
    found |= {"4XX": {"description": "what was asked is wrong"}, "5XX": {"description": "it failed, or not now"}}
    return {status: {"model": Problem, **each} for status, each in found.items()}


def envelope(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The body of an error response."""
    return {"error": {"message": _writable(message), "type": kind, "param": param and _writable(param), "code": code}}


def _writable(text: str) -> str:
    """Text that UTF-8 can write: clients send halves of surrogate pairs, and messages quote them."""
    return text.encode(errors="backslashreplace").decode()


def status_of(error: AdaptiveSpecError) -> tuple[int, str]:
    """Return the HTTP status and the OpenAI error type of an error raised on purpose."""
    for kind, status, name in STATUS:
        if isinstance(error, kind):
            return status, name
    return 500, "server_error"


def answer_of(error: AdaptiveSpecError) -> JSONResponse:
    """The response that tells a client of an error raised on purpose."""
    status, kind = status_of(error)
    code = "rate_limit_exceeded" if isinstance(error, RateLimitError) else None
    headers = None
    if isinstance(error, BusyError):
        headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_seconds)))}
    return JSONResponse(envelope(str(error), kind, code), status, headers)


def refusal(
    status: int, message: str, headers: Mapping[str, str] | None = None, code: str | None = None
) -> JSONResponse:
    """The response that refuses a request for what HTTP says of it."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return JSONResponse(envelope(message, kind, code), status, headers)


def add_handlers(app: FastAPI) -> None:
    """Answer every error of the tree, every bad body and every unknown route in the envelope."""

    @app.exception_handler(AdaptiveSpecError)
    def on_purpose(request: Request, error: AdaptiveSpecError) -> JSONResponse:
        return answer_of(error)

    @app.exception_handler(RequestValidationError)
    def bad_body(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        # Parts with a bracket name the alternatives of a type, not places in the body.
        where = ".".join(part for part in map(str, first["loc"]) if part != "body" and "[" not in part)
        message = f"{where or 'body'}: {first['msg']}"
        return JSONResponse(envelope(message, "invalid_request_error", param=where or None), 400)

    @app.exception_handler(HTTPException)
    def plain_http(request: Request, error: HTTPException) -> JSONResponse:
        code = "model_not_found" if "model" in request.path_params and error.status_code == 404 else None
        headers = {"Allow": ", ".join(_allowed(request))} if error.status_code == 405 else error.headers
        return refusal(error.status_code, str(error.detail), headers, code)

    @app.exception_handler(SQLAlchemyError)
    def database_down(request: Request, error: SQLAlchemyError) -> JSONResponse:
        logger.error("The database did not answer", exc_info=error)
        message = "The database did not answer. Try again, or run `adaptive-spec doctor`."
        return JSONResponse(envelope(message, "service_unavailable_error"), 503)

    @app.exception_handler(Exception)
    def unforeseen(request: Request, error: Exception) -> JSONResponse:
        # Starlette logs the traceback after this answer; the client learns nothing of the inside.
        # It goes around all middleware, so the id has to be put on here.
        found = getattr(request.state, "request_id", None)
        headers = {REQUEST_ID: found} if found else None
        return JSONResponse(envelope("Internal error; see the service's log.", "server_error"), 500, headers)


def _allowed(request: Request) -> list[str]:
    """The methods that any route of a path takes; the router tells those of the first alone."""
    return [
        method
        for method in METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    ]
