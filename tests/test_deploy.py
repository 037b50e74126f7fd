"""What cannot run here is held against the code: each variable, command, route, path and setting in it is real."""

import configparser
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from adaptive_spec.cli import app
from adaptive_spec.settings import CONFIG_VARIABLE, Settings, load_settings
from deploy.example import FILE, example

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
TEXTS = [ROOT / "Dockerfile", *(path for path in DEPLOY.rglob("*") if path.suffix in (".yml", ".service"))]
UNIT = DEPLOY / "adaptive-spec.service"
STATE, CACHE = "/var/lib/adaptive-spec", "/var/cache/adaptive-spec"


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yml").read_text())  # type: ignore[no-any-return]


def dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return parser["Service"]


def test_the_example_is_what_the_settings_are() -> None:
    assert FILE.read_text() == example(), "run `python -m deploy.example`"


def test_the_example_loads_as_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = load_settings()
    monkeypatch.setenv(CONFIG_VARIABLE, str(FILE))
    assert load_settings().model_dump() == defaults.model_dump()
    assert set(tomllib.loads(FILE.read_text())) == set(Settings.model_fields)


@pytest.mark.parametrize("file", TEXTS, ids=lambda path: path.name)
def test_variables_are_settings(file: Path) -> None:
    known = {
        f"ADAPTIVE_SPEC_{section}__{name}".upper()
        for section, tree in Settings.model_fields.items()
        for name in tree.annotation.model_fields  # type: ignore[union-attr]
    }
    assert set(re.findall(r"ADAPTIVE_SPEC_[A-Z_]+", file.read_text())) <= known


def test_commands_are_commands() -> None:
    (entry,) = re.findall(r'^ENTRYPOINT \["(.*)"\]$', dockerfile(), re.MULTILINE)
    (default,) = re.findall(r'^CMD \["(.*)"\]$', dockerfile(), re.MULTILINE)
    executable, flag, config, command = unit()["ExecStart"].split()
    group: Any = get_command(app)
    assert entry == Path(executable).name == "adaptive-spec"
    assert {default, command} <= set(group.commands)
    assert flag in {option for parameter in group.params for option in parameter.opts}
    assert Path(config).name == FILE.name


def test_the_image_runs_without_root_and_says_when_it_is_ready() -> None:
    text = dockerfile()
    last = text.rpartition("\nFROM ")[2]
    assert last.startswith("runtime-${VARIANT}")
    assert set(re.findall(r"AS runtime-(\w+)", text)) == {"cpu", "cuda"}
    user = int(re.findall(r"^USER (.*)$", last, re.MULTILINE)[-1])
    assert user > 0 and f"--uid {user} " in last
    assert re.search(r"HEALTHCHECK .*127\.0\.0\.1:8000/readyz", last)
    assert f'VOLUME ["{STATE}", "{CACHE}"]' in last
    assert load_settings().server.port == 8000


def test_the_image_is_built_from_what_is_there() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile(), re.MULTILINE)
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    names = {name for names in copied for name in names.split()}
    assert names == set(allowed)
    assert all((ROOT / name).exists() for name in names)


def test_every_container_is_watched_and_waits_for_those_it_needs() -> None:
    services = compose()["services"]
    assert set(services) == {"adaptive-spec", "postgres", "prometheus", "grafana"}
    for name, service in services.items():
        assert "healthcheck" in service or "build" in service, f"{name}: the image has its own"
        for needed, how in service.get("depends_on", {}).items():
            assert needed in services and how == {"condition": "service_healthy"}
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name} is reachable from elsewhere"


def test_every_mount_is_there() -> None:
    document = compose()
    for service in document["services"].values():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert (DEPLOY / source).is_dir() if source.startswith(".") else source in document["volumes"], mount
    targets = {mount.split(":")[1] for mount in document["services"]["adaptive-spec"]["volumes"]}
    assert targets == {STATE, CACHE}


def test_secrets_are_asked_for_and_not_written_down() -> None:
    for service in compose()["services"].values():
        for name, value in service.get("environment", {}).items():
            if re.search("PASSWORD|TOKEN|URL", name):
                assert re.search(r"\$\{[A-Z_]+:\?", value), name


def test_the_gpu_is_laid_over_a_service_that_is_there() -> None:
    over = yaml.safe_load((DEPLOY / "compose.cuda.yml").read_text())["services"]
    assert set(over) <= set(compose()["services"])
    assert over["adaptive-spec"]["build"]["args"]["VARIANT"] == "cuda"


def test_prometheus_scrapes_the_service() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["adaptive-spec:8000"]}]


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    folder = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards" / "files.yml").read_text())["providers"]
    mounts = {m.split(":")[1]: m.split(":")[0] for m in compose()["services"]["grafana"]["volumes"]}
    assert source["url"] == "http://prometheus:9090"
    assert mounts[provider["options"]["path"]] == "./grafana"


def test_state_and_cache_of_the_unit_are_where_the_program_looks() -> None:
    service = unit()
    environment = dict(pair.split("=", 1) for pair in service["Environment"].split())
    assert f"{environment['XDG_DATA_HOME']}/{service['StateDirectory']}" == STATE
    assert f"{environment['XDG_CACHE_HOME']}/{service['CacheDirectory']}" == CACHE
    assert float(service["TimeoutStopSec"]) > load_settings().decoder.drain_seconds


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    installed = tmp_path / UNIT.name
    present = shutil.which("true") or ""  # the program is not installed where the unit says
    installed.write_text(UNIT.read_text().replace("/opt/adaptive-spec/bin/adaptive-spec", present))
    verified = subprocess.run(["systemd-analyze", "verify", installed], capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
    exposure = ["systemd-analyze", "security", "--offline=yes", "--threshold=25", "--no-pager", installed]
    judged = subprocess.run(exposure, capture_output=True, text=True)
    assert judged.returncode == 0, judged.stdout
