"""Bundles through a store that machines share: in memory, in a folder, and on an object store when moto is there."""

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from adaptive_spec.core import Thresholds
from adaptive_spec.errors import ReleaseError, SettingsError
from adaptive_spec.records.database import Database
from adaptive_spec.releases.bundle import read_bundle, write_bundle
from adaptive_spec.releases.registry import live_release, publish
from adaptive_spec.releases.store import BundleStore

NAME = "release-000001"


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "memory":
        yield f"memory://{uuid.uuid4().hex}/releases"
    elif request.param == "file":
        yield f"file://{tmp_path / 'shared'}"
    else:
        s3 = pytest.importorskip("s3fs", reason="the extra s3 is not installed").S3FileSystem
        moto = pytest.importorskip("moto.server", reason="moto is not installed")
        server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
        server.start()
        host, port = server.get_host_and_port()
        given = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
        for name, value in (given | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}).items():
            monkeypatch.setenv(name, value)
        s3.clear_instance_cache()  # they hold on to the server of an earlier test
        bucket = f"bucket-{uuid.uuid4().hex}"
        fsspec.filesystem("s3").mkdir(bucket)
        yield f"s3://{bucket}/releases"
        s3.clear_instance_cache()
        server.stop()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 40)
    return folder


def trainer(tmp_path: Path, url: str, adapter: Path) -> BundleStore:
    """The machine that makes release 1."""
    store = BundleStore(tmp_path / "trainer", url)
    numbers = {"code": Thresholds(temperature=1.5)}
    write_bundle(store.folder, 1, adapter=adapter, thresholds=numbers, provenance={"parent": 0})
    store.push(NAME)
    return store


def test_another_machine_fetches_what_was_published(tmp_path: Path, url: str, adapter: Path) -> None:
    made = trainer(tmp_path, url, adapter)
    decoder = BundleStore(tmp_path / "decoder", url)
    folder = decoder.fetch(NAME)
    assert read_bundle(folder).for_domain("code").temperature == 1.5
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert len(files) == 4
    for file in files:
        assert (folder / file).read_bytes() == (made.folder / NAME / file).read_bytes()
    assert [path.name for path in decoder.folder.iterdir()] == [NAME]
    made.push(NAME)  # once more changes nothing
    shutil.rmtree(made.folder)
    assert decoder.fetch(NAME) == folder


def test_what_is_damaged_or_half_there_is_not_kept(tmp_path: Path, url: str, adapter: Path) -> None:
    trainer(tmp_path, url, adapter)
    files, prefix = fsspec.core.url_to_fs(url)
    weights, manifest = f"{prefix}/{NAME}/adapter/adapter_model.safetensors", f"{prefix}/{NAME}/manifest.json"
    whole = files.cat_file(weights)
    decoder = BundleStore(tmp_path / "decoder", url)
    files.pipe_file(weights, whole[:100] + b"!" + whole[101:])
    with pytest.raises(ReleaseError, match="is damaged"):
        decoder.fetch(NAME)
    files.rm_file(weights)
    with pytest.raises(ReleaseError, match="cannot be fetched"):
        decoder.fetch(NAME)
    files.pipe_file(weights, whole)
    told = files.cat_file(manifest)
    files.rm_file(manifest)  # an upload that was cut short
    with pytest.raises(ReleaseError, match="cannot be fetched"):
        decoder.fetch(NAME)
    outside = json.loads(told)
    outside["files"]["../../escaped"] = outside["files"]["release.json"]
    files.pipe_file(manifest, json.dumps(outside).encode())
    with pytest.raises(ReleaseError, match="no file of a bundle"):
        decoder.fetch(NAME)
    assert list(decoder.folder.iterdir()) == []
    files.pipe_file(manifest, told)
    assert decoder.fetch(NAME).exists()


def test_two_databases_cannot_share_a_store(tmp_path: Path, url: str, adapter: Path) -> None:
    trainer(tmp_path, url, adapter)
    other = BundleStore(tmp_path / "other", url)
    write_bundle(other.folder, 1, adapter=None, thresholds={}, provenance={"parent": 0})
    with pytest.raises(ReleaseError, match="holds another"):
        other.push(NAME)
    assert BundleStore(tmp_path / "decoder", url).fetch(NAME).joinpath("adapter").is_dir()


def test_the_live_release_comes_out_of_the_store(tmp_path: Path, adapter: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    made = trainer(tmp_path, url, adapter)
    database = Database(f"sqlite:///{tmp_path / 'r.db'}")
    database.upgrade()
    publish(database, made.folder, 1, {"passed": True})
    with pytest.raises(ReleaseError):
        live_release(database, tmp_path / "decoder")
    assert live_release(database, BundleStore(tmp_path / "decoder", url)).version == 1
    database.close()


def test_a_store_that_nothing_opens_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nonsense://bucket"):
        BundleStore(tmp_path, "nonsense://bucket")
    assert BundleStore(tmp_path).fetch("release-000009") == tmp_path / "release-000009"
