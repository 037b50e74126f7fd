import base64
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from adaptive_spec.errors import SettingsError
from adaptive_spec.serving.app import check_bind, create_app
from adaptive_spec.serving.authorization import needed_scope
from adaptive_spec.serving.headers import HEADERS
from adaptive_spec.serving.tokens import TokenFile
from adaptive_spec.settings import ServerSettings
from tests.serving.test_tokens import quick_hash

__all__ = ["quick_hash"]

READS = ("/", "/metrics", "/version", "/openapi.json", "/api/runs", "/api/nothing")


@pytest.fixture
def open_app(service: Any) -> Callable[..., TestClient]:
    """Build the application under settings of the server."""

    def build(**server: Any) -> TestClient:
        service.configure("server", **server)
        return TestClient(create_app(service), raise_server_exceptions=False)

    return build


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def tokens(service: Any) -> dict[str, str]:
    """Scope -> a token that has it alone."""
    file = TokenFile(service.settings.server.token_file)
    return {scope: file.add(f"for {scope}", [scope]) for scope in ("admin", "read", "api")}


def test_every_route_has_a_scope_by_method_and_path(service: Any) -> None:
    found = {
        f"{method.upper()} {path}": needed_scope(method.upper(), path)
        for path, item in create_app(service).openapi()["paths"].items()
        for method in item
    }
    assert {route for route, scope in found.items() if scope is None} == {"GET /livez", "GET /readyz"}
    assert {route for route, scope in found.items() if scope == "api"} == {r for r in found if " /v1/" in r}
    assert {r for r, scope in found.items() if scope == "admin"} == {
        r for r in found if "/v1/" not in r and not r.startswith("GET ")
    }


def test_scopes_open_their_routes_alone(open_app: Callable[..., TestClient], tokens: dict[str, str]) -> None:
    client = open_app(read_needs_token=True, api_needs_token=True)
    body = {"prompt": "x"}
    for given, admin, read, api in (
        (None, 401, 401, 401),
        ("as-00000000-wrong", 401, 401, 401),
        (tokens["admin"], 200, 200, 403),
        (tokens["read"], 403, 200, 403),
        (tokens["api"], 403, 403, 200),
    ):
        headers = bearer(given) if given else {}
        assert client.post("/api/calibrate", headers=headers).status_code == admin
        assert client.get("/api/runs", headers=headers).status_code == read
        assert client.post("/v1/completions", json=body, headers=headers).status_code == api
    for probe in ("/livez", "/readyz"):
        assert client.get(probe).status_code == 200
    for path in READS:
        assert client.get(path).status_code == 401
    assert client.post("/api/nothing").status_code == 401, "strangers do not learn which routes there are"


def test_reads_and_v1_are_open_unless_closed(open_app: Callable[..., TestClient], tokens: dict[str, str]) -> None:
    client = open_app()
    assert client.get("/api/runs").status_code == 200
    assert client.post("/v1/completions", json={"prompt": "x"}, headers=bearer("sk-any")).status_code == 200
    assert client.post("/api/calibrate").status_code == 401


def test_the_plain_token_opens_everything(open_app: Callable[..., TestClient]) -> None:
    client = open_app(token="s3cret", read_needs_token=True, api_needs_token=True)
    assert client.post("/api/calibrate", headers=bearer("s3cret")).status_code == 200
    assert client.get("/metrics", headers=bearer("s3cret")).status_code == 200
    assert client.post("/v1/completions", json={"prompt": "x"}, headers=bearer("s3cret")).status_code == 200


def test_a_browser_is_asked_for_the_token_of_the_page(
    open_app: Callable[..., TestClient], tokens: dict[str, str]
) -> None:
    client = open_app(read_needs_token=True)
    asked = client.get("/")
    assert asked.headers["WWW-Authenticate"].startswith("Basic ")
    assert client.get("/api/runs").headers["WWW-Authenticate"] == "Bearer"
    given = base64.b64encode(f"me:{tokens['read']}".encode()).decode()
    assert "adaptive-spec" in client.get("/", headers={"Authorization": f"Basic {given}"}).text
    for broken in ("Basic", "Basic ?", "Basic /////w==", "Digest x", "Bearer"):
        assert client.get("/", headers={"Authorization": broken}).status_code == 401


def test_tokens_change_without_a_restart(open_app: Callable[..., TestClient], service: Any) -> None:
    client, file = open_app(), TokenFile(service.settings.server.token_file)
    assert client.post("/api/calibrate").status_code == 200, "on loopback, while there is no token"
    made = file.add("one", ["admin"])
    assert client.post("/api/calibrate").status_code == 401
    assert client.post("/api/calibrate", headers=bearer(made)).status_code == 200
    file.revoke("one")
    assert client.post("/api/calibrate", headers=bearer(made)).status_code == 401


def test_who_shares_an_address_is_told_apart_by_token(
    open_app: Callable[..., TestClient], tokens: dict[str, str], service: Any
) -> None:
    service.configure("limits", client_requests_per_minute=1)
    client = open_app()

    def status(headers: dict[str, str]) -> int:
        return client.post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code

    assert [status(bearer(tokens["api"])) for _ in range(2)] == [200, 429]
    assert [status(bearer(made_up)) for made_up in ("sk-1", "sk-2", "as-00000000-x")] == [200, 429, 429]
    assert status(bearer(tokens["read"])) == 200


def test_an_open_bind_wants_a_token_that_may_change_things(service: Any) -> None:
    file = TokenFile(service.settings.server.token_file)
    server = ServerSettings(host="0.0.0.0", token_file=file.path)
    file.add("reader", ["read", "api"])
    with pytest.raises(SettingsError, match="tokens add"):
        check_bind(server)
    file.add("me", ["admin"])
    check_bind(server)
    file.path.write_text("{")
    with pytest.raises(SettingsError, match="damaged"):
        check_bind(server)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[", "[::1", "0x7f.1"])
def test_names_that_point_here_are_refused_on_loopback(open_app: Callable[..., TestClient], host: str) -> None:
    client = open_app(allowed_hosts=())
    for method, path in (("GET", "/api/runs"), ("POST", "/api/calibrate"), ("GET", "/livez")):
        answer = client.request(method, path, headers={"Host": host})
        assert answer.status_code == 403
        assert "server.allowed_hosts" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "127.9.9.9"])
def test_names_of_this_machine_are_ours(open_app: Callable[..., TestClient], host: str) -> None:
    assert open_app(allowed_hosts=()).get("/api/runs", headers={"Host": host}).status_code == 200


def test_hosts_that_the_operator_names(open_app: Callable[..., TestClient]) -> None:
    client = open_app(allowed_hosts=("Spec.example",), host="0.0.0.0", token="t")
    assert client.get("/api/runs", headers={"Host": "spec.example:80"}).status_code == 200
    assert client.get("/api/runs", headers={"Host": "other.example"}).status_code == 403
    client = open_app(allowed_hosts=())
    assert client.get("/api/runs", headers={"Host": "other.example"}).status_code == 200, "bound elsewhere, no list"


@pytest.mark.parametrize("path", ["/api/calibrate", "/v1/completions"])
def test_pages_elsewhere_change_nothing(open_app: Callable[..., TestClient], service: Any, path: str) -> None:
    client = open_app(allowed_origins=("https://ui.example",))
    body = {"domain": "a"} if path == "/api/calibrate" else {"prompt": "x"}
    for origin, status in (
        ("https://evil.example", 403),
        ("null", 403),
        ("http://testserver:1", 403),
        ("http://testserver", 200),
        ("https://ui.example", 200),
    ):
        assert client.post(path, json=body, headers={"Origin": origin}).status_code == status
    assert len(service.engine.requests) == (2 if path == "/v1/completions" else 0)


def test_cors_is_closed_but_to_listed_origins(open_app: Callable[..., TestClient]) -> None:
    asking = {"Origin": "https://ui.example", "Access-Control-Request-Method": "POST"}
    closed = open_app()
    assert closed.options("/v1/completions", headers=asking).status_code == 405
    assert "Access-Control-Allow-Origin" not in closed.get("/api/runs", headers=asking).headers
    opened = open_app(allowed_origins=("https://ui.example",), api_needs_token=True, token="t")
    preflight = opened.options(
        "/v1/completions", headers={**asking, "Access-Control-Request-Headers": "authorization,content-type"}
    )
    assert preflight.status_code == 200
    assert preflight.headers["Access-Control-Allow-Origin"] == "https://ui.example"
    setting = {**asking, "Access-Control-Request-Method": "PUT"}
    setting["Access-Control-Request-Headers"] = "authorization,content-type,idempotency-key,if-none-match"
    assert opened.options("/api/thresholds/code", headers=setting).status_code == 200
    assert opened.options("/v1/completions", headers={**asking, "Origin": "https://evil.example"}).status_code == 400
    told = opened.post("/v1/completions", json={"prompt": "x"}, headers={"Origin": "https://ui.example"})
    assert told.status_code == 401 and told.headers["Access-Control-Allow-Origin"] == "https://ui.example"
    assert "Access-Control-Allow-Credentials" not in told.headers


@pytest.mark.parametrize("origin", ["*", "https://*.example", "ui.example", "https://ui.example/", "null"])
def test_origins_are_listed_one_by_one(origin: str) -> None:
    with pytest.raises(ValueError, match="allowed_origins"):
        ServerSettings(allowed_origins=(origin,))


def test_every_response_has_the_headers(open_app: Callable[..., TestClient], service: Any) -> None:
    service.configure("limits", client_requests_per_minute=3, body_bytes=500)
    client = open_app(token="t")
    post = client.post
    answers = {
        200: client.get("/api/runs"),
        202: post("/api/retrain", headers=bearer("t")),
        400: post("/v1/completions", json={}),
        401: post("/api/retrain"),
        403: client.get("/", headers={"Host": "evil.example"}),
        404: client.get("/nothing"),
        413: post("/v1/completions", content=b"x" * 501),
    }
    service.engine.submit = lambda request: 1 / 0
    answers[500] = post("/v1/completions", json={"prompt": "x"})
    answers[429] = post("/v1/completions", json={"prompt": "x"})
    for status, answer in answers.items():
        assert answer.status_code == status
        for name, value in HEADERS.items():
            polled = name == "Cache-Control" and "ETag" in answer.headers  # may be kept, if it is asked for each time
            assert answer.headers[name] == ("private, no-cache" if polled else value)
    page = client.get("/").headers
    assert (
        "style-src" in page["Content-Security-Policy"] and "frame-ancestors 'none'" in page["Content-Security-Policy"]
    )
    assert page["X-Content-Type-Options"] == "nosniff" and page["Cache-Control"] == "no-store"
