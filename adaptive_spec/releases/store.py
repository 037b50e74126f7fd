"""Where bundles come from: a folder of this machine, and behind it, if one is set, a store that machines share.

The store is a URL that fsspec opens (``s3://bucket/prefix``, ``file:///mnt/releases``, …).  A bundle is immutable, so
a machine fetches it once; the folder is its cache.  Called by the registry and the pipeline.  Knows nothing of rows.
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec

from adaptive_spec.errors import ReleaseError, SettingsError
from adaptive_spec.redaction import hide_secrets
from adaptive_spec.releases.bundle import MANIFEST_NAME, read_bundle, sync_folder, write_durably

T = TypeVar("T")
_ADVICE = "Look at releases.store and at the network, then retry."


class BundleStore:
    """Bundles below ``folder``, and in the store at ``url`` where there is one.

    Raises:
        SettingsError: nothing that is installed opens the URL.
    """

    def __init__(self, folder: Path, url: str = "") -> None:
        self.folder = folder
        self.url = url.rstrip("/")
        self._shown_url = hide_secrets(self.url)
        if self.url:
            self._files, self._prefix = _open(self.url)

    def fetch(self, name: str) -> Path:
        """Return the folder of a bundle on this machine; one that is not here yet is fetched and checked whole first.

        It is written under a temporary name and renamed, so that a crash leaves no half release.

        Raises:
            ReleaseError: the store does not have it, cannot be read, or holds a damaged one.
        """
        final = self.folder / name
        if final.exists() or not self.url:
            return final
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".fetch-{name}-", dir=self.folder))
        try:
            building = temporary / name
            building.mkdir(mode=0o755)
            _asked(partial(self._download, name, building), f"{name} cannot be fetched from {self._shown_url}")
            read_bundle(building)
            _rename(building, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync_folder(self.folder)
        return final

    def push(self, name: str) -> None:
        """Copy a bundle of this machine to the store, the manifest last: what has one is whole.

        Raises:
            ReleaseError: the store cannot be written, or has another bundle of this name.
        """
        if self.url:
            _asked(partial(self._upload, self.folder / name, name), f"{name} cannot be written to {self._shown_url}")

    def _download(self, name: str, building: Path) -> None:
        manifest = self._read(f"{name}/{MANIFEST_NAME}")
        for relative in [*_listed(manifest), MANIFEST_NAME]:
            place = building / relative
            place.parent.mkdir(parents=True, exist_ok=True)
            write_durably(place, manifest if relative == MANIFEST_NAME else self._read(f"{name}/{relative}"))
            sync_folder(place.parent)

    def _upload(self, folder: Path, name: str) -> None:
        manifest = (folder / MANIFEST_NAME).read_bytes()
        there = self._read_if_there(f"{name}/{MANIFEST_NAME}")
        if there is not None:
            if there != manifest:
                raise ReleaseError(f"{self._shown_url} holds another {name}. Give each database a store of its own.")
            return
        for relative in [*_listed(manifest), MANIFEST_NAME]:
            place = f"{self._prefix}/{name}/{relative}"
            self._files.makedirs(place.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(place, (folder / relative).read_bytes())

    def _read(self, relative: str) -> bytes:
        return bytes(self._files.cat_file(f"{self._prefix}/{relative}"))

    def _read_if_there(self, relative: str) -> bytes | None:
        try:
            return self._read(relative)
        except FileNotFoundError:
            return None


def _open(url: str) -> tuple[Any, str]:
    try:
        files, prefix = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise SettingsError(
            f"releases.store {hide_secrets(f'{url} cannot be opened ({error})')}. "
            "s3:// needs `pip install 'adaptive-spec[s3]'`."
        ) from error
    return files, str(prefix).rstrip("/")


def _listed(manifest: bytes) -> list[str]:
    """The files that a manifest names; none may lie outside the bundle."""
    try:
        names = sorted(json.loads(manifest)["files"])
    except (ValueError, TypeError, KeyError) as error:
        raise ReleaseError(f"The manifest in the store cannot be read ({error}). {_ADVICE}") from error
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or name != path.as_posix():
            raise ReleaseError(f"The manifest in the store names {name!r}, which is no file of a bundle. {_ADVICE}")
    return names


def _asked(work: Callable[[], T], failure: str) -> T:
    """Do it; stores fail with errors of all kinds, of their own libraries too."""
    try:
        return work()
    except ReleaseError:
        raise
    except Exception as error:
        raise ReleaseError(f"{failure} ({type(error).__name__}: {hide_secrets(str(error))}). {_ADVICE}") from error


def _rename(building: Path, final: Path) -> None:
    try:
        building.rename(final)
    except OSError:
        if not final.exists():  # else another process has fetched the same bundle meanwhile
            raise
