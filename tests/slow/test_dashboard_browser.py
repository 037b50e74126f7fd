"""The dashboard in a real browser: readable by everybody, on a phone and in the dark.  ``make test-browser`` installs
what drives the browser; Chromium itself is the machine's."""

import shutil
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from adaptive_spec.records.canaries import begin_canary
from adaptive_spec.records.releases import add_release, set_live
from adaptive_spec.records.runs import create_run, update_run
from adaptive_spec.serving.app import create_app
from tests.records.rows import make_finish, make_step, record
from tests.serving.conftest import Service, service, settings, tokenizer  # noqa: F401

sync_api = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="make test-browser installs it")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
PAGES = ("/", "/domains/code?days=365", "/releases", "/releases/1", "/runs", "/runs/1", "/events")


@pytest.fixture
def url(service: Service) -> Iterator[str]:  # noqa: F811
    database = service.database
    record(database, *(make_step("a", index) for index in range(6)), make_finish("a"))
    for version in (1, 2):
        add_release(database, version, f"release-{version:06d}", version - 1, {})
    set_live(database, 1, "made live by a test")
    begin_canary(database, 2, 0.25, "tried by a test")
    update_run(database, create_run(database, "person", {}), state="running", progress={"step": 3, "steps": 12})
    server = uvicorn.Server(uvicorn.Config(create_app(service), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 390)])
def test_every_page_is_accessible_and_fits(url: str, scheme: str, width: int) -> None:
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        viewport = {"width": width, "height": 800}
        context = browser.new_context(color_scheme=scheme, viewport=viewport, bypass_csp=True)
        page = context.new_page()
        for path in PAGES:
            assert page.goto(url + path).status == 200, path
            found = axe.Axe().run(page).response["violations"]
            assert [(path, one["id"], one["nodes"][0]["html"]) for one in found] == []
            assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), path
        browser.close()


def test_a_form_is_filled_in_by_keyboard_alone(url: str, service: Service) -> None:  # noqa: F811
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(f"{url}/releases")
        page.get_by_label("To release").focus()
        page.keyboard.type("0")
        page.keyboard.press("Tab")
        page.keyboard.type("by keyboard")
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        page.keyboard.press("Enter")
        page.wait_for_url("**/?notice=*")
        assert "Release 0 is live" in page.content()
        browser.close()
    assert service.engine.release.version == 0
