"""Bundles: the files of a release.  Written whole or not at all, checked whole before anything is used.

A bundle is the folder ``release-000007`` with ``release.json`` (thresholds, vocabulary, provenance), ``adapter/`` where
the draft has one, ``adapters/0`` … of domains that have their own, and ``manifest.json``, which holds the SHA-256 of
every other file.  Called by the pipeline to write and by ``registry`` and
the decoder to read.  Knows nothing of the database.
"""

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedModel

from adaptive_spec.core import SIMILARITIES, VERIFIERS, LengthRule, Release, Rule, Thresholds
from adaptive_spec.errors import ReleaseError
from adaptive_spec.releases.adapter import ADVICE, CONFIG_NAME, WEIGHTS_NAME, load_adapter_delta, verify_adapter

__all__ = ["bundle_name", "load_adapter_delta", "newest_version", "read_bundle", "verify_adapter", "write_bundle"]

FORMAT = 4
_READABLE = {  # format -> what its release.json holds
    1: {"version", "thresholds", "provenance"},
    2: {"version", "thresholds", "provenance", "vocabulary", "domain_adapters"},
    3: {"version", "thresholds", "provenance", "vocabulary", "domain_adapters"},  # thresholds may hold a rule
    4: {
        "version",
        "thresholds",
        "provenance",
        "vocabulary",
        "domain_adapters",
    },  # and an offset, numbers by batch and match
}
MAX_CHAIN_LENGTH = 64
_MANIFEST, _DESCRIPTION, _ADAPTER = "manifest.json", "release.json", "adapter"
_OWN = "adapters"
_SHARED = ""  # no domain's name


def bundle_name(version: int) -> str:
    """Return the folder name of a version."""
    return f"release-{version:06d}"


def newest_version(root: Path) -> int:
    """Return the highest version that has a folder below ``root``; 0 without any."""
    found = (re.fullmatch(r"release-(\d+)", path.name) for path in root.glob("release-*"))
    return max((int(match[1]) for match in found if match), default=0)


def write_bundle(
    root: Path,
    version: int,
    *,
    adapter: Path | None,
    thresholds: Mapping[str, Thresholds],
    provenance: Mapping[str, Any],
    vocabulary: Sequence[int] | None = None,
    domain_adapters: Mapping[str, Path] | None = None,
) -> Path:
    """Write the bundle of ``version`` below ``root`` and return its folder.

    It is built under a temporary name, flushed to the disk and renamed, so that a crash leaves no half release.

    Args:
        adapter: a folder that peft saved; its two files are copied.
        provenance: JSON values; ``parent`` (a version) and ``hashes`` (of the models) are read back.
        vocabulary: the only tokens that the draft proposes; None: all.
        domain_adapters: folders of the adapters that domains have for themselves.

    Raises:
        ReleaseError: the version exists, the adapter lacks a file, or a value is out of range.
    """
    final = root / bundle_name(version)
    if version < 1 or final.exists():
        raise ReleaseError(f"Release {version} exists already or is not above 0. Use the next version.")
    own = dict(sorted((domain_adapters or {}).items()))
    description = {
        "version": version,
        "vocabulary": None if vocabulary is None else _checked_vocabulary(list(vocabulary)),
        "domain_adapters": {domain: f"{_OWN}/{index}" for index, domain in enumerate(own)},
        "thresholds": {domain: asdict(_checked(domain, values)) for domain, values in thresholds.items()},
        "provenance": dict(provenance),
    }
    root.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=root))
    try:
        building.chmod(0o755)
        _write_durably(building / _DESCRIPTION, _json_bytes(description))
        if adapter is not None:
            _copy_adapter(adapter, building / _ADAPTER)
        for index, folder in enumerate(own.values()):
            _copy_adapter(folder, building / _OWN / str(index))
        manifest = {"format": FORMAT, "version": version, "files": _hashes(building)}
        _write_durably(building / _MANIFEST, _json_bytes(manifest))
        _sync_folder(building)
        building.rename(final)
    except (OSError, ValueError, TypeError) as error:
        raise ReleaseError(
            f"Release {version} cannot be written to {root} ({error}). Check the disk, then retry."
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    _sync_folder(root)
    return final


def read_bundle(
    folder: Path, *, draft: PreTrainedModel | None = None, hashes: Mapping[str, str] | None = None
) -> Release:
    """Check a bundle whole and return its release.

    Args:
        draft: also check the adapter's tensors against it.
        hashes: of the models in use; the bundle must have been made for exactly these.

    Raises:
        ReleaseError: anything is missing, added, damaged, foreign, misshapen, not finite or out of range.
    """
    version, keys = _check_manifest(folder)
    description = {"vocabulary": None, "domain_adapters": {}} | _parse(folder / _DESCRIPTION, keys)
    provenance, table = description["provenance"], description["thresholds"]
    if description["version"] != version or not isinstance(provenance, dict) or not isinstance(table, dict):
        raise ReleaseError(f"{folder / _DESCRIPTION} contradicts the manifest. {ADVICE}")
    if hashes is not None and provenance.get("hashes") != dict(hashes):
        raise ReleaseError(f"{folder} was made for other models than those in use. Load its models, or roll back.")
    parent = provenance.get("parent")
    if parent is not None and not _is_count(parent):
        raise ReleaseError(f"{folder}: the parent {parent!r} is not a version. {ADVICE}")
    thresholds = {domain: _thresholds(domain, values) for domain, values in table.items()}
    vocabulary = description["vocabulary"]
    adapters = _adapters(folder, description["domain_adapters"])
    if draft is not None:
        for adapter in adapters.values():
            verify_adapter(adapter, draft)
    shared = adapters.pop(_SHARED, None)
    return Release(
        version,
        MappingProxyType(thresholds),
        None if shared is None else str(shared),
        parent,
        None if vocabulary is None else tuple(_checked_vocabulary(vocabulary)),
        MappingProxyType({domain: str(adapter) for domain, adapter in adapters.items()}),
    )


def _adapters(folder: Path, own: Any) -> dict[str, Path]:
    """The folders of all adapters that are there, which must be those that are described."""
    if not isinstance(own, dict) or sorted(map(str, own.values())) != sorted(f"{_OWN}/{i}" for i in range(len(own))):
        raise ReleaseError(f"{folder}: the domains' adapters are malformed. {ADVICE}")
    described = {domain: folder / place for domain, place in own.items()}
    if (folder / _ADAPTER).is_dir():
        described[_SHARED] = folder / _ADAPTER
    wanted = {adapter / name for adapter in described.values() for name in (CONFIG_NAME, WEIGHTS_NAME)}
    found = {path for path in folder.rglob("*") if path.is_file()} - {folder / _DESCRIPTION, folder / _MANIFEST}
    if found != wanted:
        names = sorted(path.relative_to(folder).as_posix() for path in found)
        raise ReleaseError(f"{folder} does not hold exactly the files of a release: {names}. {ADVICE}")
    return described


def _checked_vocabulary(vocabulary: Any) -> list[int]:
    tokens = vocabulary if isinstance(vocabulary, list) else []
    if not tokens or not all(map(_is_count, tokens)) or any(a >= b for a, b in pairwise(tokens)):
        raise ReleaseError(f"A vocabulary is a list of token ids in ascending order, not empty. {ADVICE}")
    return tokens


def _check_manifest(folder: Path) -> tuple[int, set[str]]:
    """Return the version, and what the description of this format holds."""
    manifest = _parse(folder / _MANIFEST, {"format", "version", "files"})
    version, listed = manifest["version"], manifest["files"]
    if manifest["format"] not in _READABLE:
        raise ReleaseError(f"{folder} has format {manifest['format']!r}, not {FORMAT}. Upgrade adaptive-spec.")
    if not _is_count(version) or folder.name != bundle_name(version) or not isinstance(listed, dict):
        raise ReleaseError(f"{folder} is not the folder of the release that its manifest names. {ADVICE}")
    try:
        found = _hashes(folder)
    except OSError as error:
        raise ReleaseError(f"{folder} cannot be read ({error}). {ADVICE}") from error
    wrong = sorted(name for name in listed.keys() | found.keys() if listed.get(name) != found.get(name))
    if wrong:
        raise ReleaseError(f"{folder} is damaged: {wrong} differ from the manifest. {ADVICE}")
    return int(version), _READABLE[manifest["format"]]


def _parse(path: Path, keys: set[str]) -> dict[str, Any]:
    """Read JSON exactly as ``_json_bytes`` writes it: then every flipped byte shows, also in the manifest itself."""
    try:
        raw = path.read_bytes()
        value = json.loads(raw, parse_constant=_refuse_constant)
        canonical = isinstance(value, dict) and _json_bytes(value) == raw
    except (OSError, ValueError, RecursionError) as error:
        raise ReleaseError(f"{path} cannot be read ({error}). {ADVICE}") from error
    if not canonical or value.keys() != keys:
        raise ReleaseError(f"{path} is not as it was written. {ADVICE}")
    return dict(value)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _json_bytes(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _thresholds(domain: str, values: Any) -> Thresholds:
    try:
        return _checked(domain, Thresholds.from_dict(values))
    except (TypeError, AttributeError) as error:
        raise ReleaseError(f"The thresholds of {domain!r} are malformed ({error}). {ADVICE}") from error


def _checked(domain: str, values: Thresholds) -> Thresholds:
    """Return ``values``, or raise ReleaseError naming what is out of range."""
    checks = {
        "temperature": _is_temperature(values.temperature),
        "stop_below, max_chain_length": _is_length_rule(values.lengths_at(1)),
        "survival": all(_is_number(share) and 0 <= share <= 1 for share in values.survival),
        "num_observations": _is_count(values.num_observations),
        "rule": values.rule is None or _is_rule(values.rule),
        "offset": _is_number(values.offset) and abs(values.offset) <= 100,
        "warmth": _is_number(values.warmth) and abs(values.warmth) <= 100,
        "sampling_temperature": _is_temperature(values.sampling_temperature),
        "larger_batches": _ascend(1, [entry.rows for entry in values.larger_batches])
        and all(map(_is_length_rule, values.larger_batches)),
        "ngram_acceptance": _ascend(0, [entry.match_length for entry in values.ngram_acceptance])
        and all(_is_count(entry.num_accepted) for entry in values.ngram_acceptance)
        and all(_is_count(entry.num_reached) for entry in values.ngram_acceptance)
        and all(entry.num_accepted <= entry.num_reached for entry in values.ngram_acceptance),
    }
    wrong = [f"{name} {attrgetter(*name.split(', '))(values)!r}" for name, good in checks.items() if not good]
    if wrong:
        raise ReleaseError(f"The thresholds of {domain!r} are out of range: {', '.join(wrong)}. {ADVICE}")
    return values


def _is_rule(rule: Rule) -> bool:
    shares = (rule.min_overlap, rule.min_similarity, rule.typical_epsilon, rule.relaxed_delta)
    return (
        rule.verifier in VERIFIERS
        and rule.similarity in SIMILARITIES
        and all(_is_count(count) and count > 0 for count in (rule.ngram_size, rule.relaxed_top_k))
        and all(_is_number(share) and 0 <= share <= 1 for share in shares)
        and _is_number(rule.typical_delta)
        and rule.typical_delta >= 0
    )


def _is_length_rule(rule: LengthRule) -> bool:
    return (
        _is_number(rule.stop_below)
        and 0 <= rule.stop_below <= 1
        and _is_count(rule.max_chain_length)
        and rule.max_chain_length <= MAX_CHAIN_LENGTH
    )


def _is_temperature(value: Any) -> bool:
    return _is_number(value) and 0.01 <= value <= 100


def _ascend(floor: int, counts: list[Any]) -> bool:
    """Whether these are whole numbers above the floor, each larger than the one before."""
    return all(map(_is_count, counts)) and all(a < b for a, b in pairwise([floor, *counts]))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file but the manifest, by its path inside the folder.  Links and odd files raise OSError."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise OSError(f"{path} is not a plain file")
        if path.is_file() and path != folder / _MANIFEST:
            with path.open("rb") as file:
                found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _copy_adapter(source: Path, destination: Path) -> None:
    destination.mkdir(parents=True)
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        _write_durably(destination / name, (source / name).read_bytes())
    _sync_folder(destination)


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
