"""The command line's end of the HTTP control plane, on the standard library alone so that commands start at once.

Even its HTTP client is loaded only when something is asked: ``--help`` asks nothing.
"""

import json
import urllib.parse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from adaptive_spec.errors import AdaptiveSpecError

if TYPE_CHECKING:
    from urllib.error import HTTPError
    from urllib.request import OpenerDirector

DEFAULT_URL = "http://127.0.0.1:8000"


class UnreachableError(AdaptiveSpecError):
    """No service answers at the URL."""


class Client:
    """Calls one service.

    Raises (every method):
        UnreachableError: nothing answers.
        AdaptiveSpecError: the service refused; the message is its own.
    """

    def __init__(self, url: str = DEFAULT_URL, token: str = "", timeout_seconds: float = 60.0) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise AdaptiveSpecError(f"{url} is not an http:// or https:// URL. Correct --url.")
        self.url = url.rstrip("/")
        self._token = token
        self._timeout_seconds = timeout_seconds

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """GET a control route; None values are left out of the query."""
        given = {name: value for name, value in query.items() if value is not None}
        return self._json(path + (f"?{urllib.parse.urlencode(given)}" if given else ""), None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST a control route."""
        return self._json(path, body)

    def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """PUT a control route."""
        return self._json(path, body, "PUT")

    def delete(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """DELETE a control route."""
        return self._json(path, body, "DELETE")

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """POST a completion route and yield its server-sent events."""
        with self._open(path, body) as answer:
            for line in answer:
                text = line.decode().strip()
                if not text.startswith("data: ") or text == "data: [DONE]":
                    continue
                event = json.loads(text.removeprefix("data: "))
                if "error" in event:
                    raise AdaptiveSpecError(event["error"]["message"])
                yield event

    def _json(self, path: str, body: dict[str, Any] | None, method: str | None = None) -> dict[str, Any]:
        with self._open(path, body, method) as answer:
            try:
                parsed = json.loads(answer.read())
            except ValueError as error:
                raise UnreachableError(f"What answers at {self.url} is not adaptive-spec. Correct --url.") from error
        return dict(parsed)

    def _open(self, path: str, body: dict[str, Any] | None, method: str | None = None) -> Any:
        from urllib.error import HTTPError
        from urllib.request import Request

        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data=data, headers=headers, method=method)
        try:
            return self._opener().open(request, timeout=self._timeout_seconds)
        except HTTPError as error:
            with error:
                raise _refusal(error, self.url) from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise UnreachableError(
                f"No service answers at {self.url} ({reason}). Start one with `adaptive-spec serve` or pass --url."
            ) from error

    def _opener(self) -> "OpenerDirector":
        from urllib.request import ProxyHandler, build_opener

        # A proxy of the environment must not see calls to this machine.
        if urllib.parse.urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1"):
            return build_opener(ProxyHandler({}))
        return build_opener()


def _refusal(error: "HTTPError", url: str) -> AdaptiveSpecError:
    try:
        return AdaptiveSpecError(str(json.loads(error.read())["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return UnreachableError(f"{url} answered {error.code} {error.reason}: not adaptive-spec. Correct --url.")
