"""Releases of the tiny draft: a sound one, and one for every way in which a bundle can be bad."""

import copy
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from adaptive_spec.core import Thresholds
from adaptive_spec.records.database import Database
from adaptive_spec.records.releases import live_version
from adaptive_spec.releases.bundle import write_bundle
from adaptive_spec.releases.registry import next_version, publish

WEIGHTS = "adapter/adapter_model.safetensors"
SOUND = {"a": Thresholds(temperature=2.0)}


def save_adapter(draft: PreTrainedModel, folder: Path, size: float = 0.02, seed: int = 0) -> Path:
    """Save an adapter whose updates are noise of this standard deviation, so that it changes what is proposed."""
    model = get_peft_model(copy.deepcopy(draft), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(str(folder))
    return folder


def make_release(
    url: str, root: Path, version: int, adapter: Path, hashes: Mapping[str, str], canary_share: float = 0.0
) -> None:
    """Write a sound bundle on top of the live release and publish it, as the pipeline does."""
    database = Database(url)
    provenance = {"parent": live_version(database), "hashes": dict(hashes)}
    write_bundle(root, version, adapter=adapter, thresholds=SOUND, provenance=provenance)
    publish(database, root, version, {}, hashes=hashes, canary_share=canary_share)
    database.close()


def publish_next(url: str, root: Path, adapter: Path, hashes: Mapping[str, str]) -> None:
    """Publish a sound release under the next version that is free."""
    database = Database(url)
    version = next_version(database, root)
    database.close()
    make_release(url, root, version, adapter, hashes)


def migrate(url: str) -> None:
    """Make the tables, or bring them up to date."""
    database = Database(url)
    database.upgrade()
    database.close()


@dataclass(frozen=True)
class Bad:
    """One bad bundle.

    Args:
        reason: what the refusal must say.
        spoil: changes the written folder.
        adapter: changes the adapter's tensors before the bundle is written; its hashes are then right.
        described: changes what ``release.json`` says; its hash is then right.
    """

    reason: str
    spoil: Callable[[Path], None] = lambda folder: None
    adapter: Callable[[dict[str, Tensor], str], None] | None = None
    described: dict[str, Any] = field(default_factory=dict)

    def reason_in(self, text: str) -> bool:
        """Whether a refusal says the reason."""
        return re.search(self.reason, text) is not None

    def write(self, root: Path, version: int, adapter: Path, hashes: Mapping[str, str]) -> Path:
        """Write the bad bundle below ``root`` and return its folder."""
        if self.adapter is not None:
            adapter = _changed(adapter, root.parent / f"adapter-{version}", self.adapter)
        provenance = {"parent": 0, "hashes": dict(hashes)}
        folder = write_bundle(root, version, adapter=adapter, thresholds=SOUND, provenance=provenance)
        if self.described:
            _describe(folder, self.described)
        self.spoil(folder)
        return folder


def _changed(adapter: Path, copy_: Path, change: Callable[[dict[str, Tensor], str], None]) -> Path:
    copy_.mkdir()
    (copy_ / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors, min(tensors))
    save_file(tensors, copy_ / "adapter_model.safetensors")
    return copy_


def _describe(folder: Path, changes: Mapping[str, Any]) -> None:
    """Change values by their dotted paths, and the manifest with them: nobody can tell by the hashes."""
    description = json.loads((folder / "release.json").read_text())
    for path, value in changes.items():
        *holders, last = path.split(".")
        holder = description
        for name in holders:
            holder = holder[name]
        holder[last] = value
    _write_json(folder / "release.json", description)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["release.json"] = hashlib.sha256((folder / "release.json").read_bytes()).hexdigest()
    _write_json(folder / "manifest.json", manifest)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _truncate(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-50])  # type: ignore[return-value]


def _flip(name: str) -> Callable[[Path], None]:
    def flip(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)

    return flip


def _put(value: float) -> Callable[[dict[str, Tensor], str], None]:
    def put(tensors: dict[str, Tensor], name: str) -> None:
        tensors[name][0, 0] = value

    return put


def _drop(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name]


def _add(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name + "_more"] = tensors[name].clone()


def _misshape(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name][:, :-1].contiguous()


BAD = {
    "truncated weights": Bad("is damaged", spoil=_truncate(WEIGHTS)),
    "truncated description": Bad("is damaged", spoil=_truncate("release.json")),
    "truncated manifest": Bad("cannot be read", spoil=_truncate("manifest.json")),
    "flipped byte in the weights": Bad("is damaged", spoil=_flip(WEIGHTS)),
    "flipped byte in the description": Bad("is damaged", spoil=_flip("release.json")),
    "missing file": Bad("is damaged", spoil=lambda folder: (folder / WEIGHTS).unlink()),
    "extra file": Bad("is damaged", spoil=lambda folder: (folder / "more").touch()),
    "wrong hash of the target": Bad("other models", described={"provenance.hashes.target": "0" * 64}),
    "wrong hash of the draft": Bad("other models", described={"provenance.hashes.draft": "0" * 64}),
    "wrong tokenizer": Bad("other models", described={"provenance.hashes.tokenizer": "0" * 64}),
    "vocabulary beyond the draft's": Bad("vocabulary", described={"vocabulary": [5, 100_000]}),
    "thresholds out of range": Bad("out of range", described={"thresholds.a.temperature": 0.0}),
    "chain too long": Bad("out of range", described={"thresholds.a.max_chain_length": 65}),
    "missing tensor": Bad("lacks the tensors", adapter=_drop),
    "extra tensor": Bad("foreign ones", adapter=_add),
    "misshapen tensor": Bad("has shape", adapter=_misshape),
    "NaN": Bad("not finite", adapter=_put(float("nan"))),
    "infinity": Bad("not finite", adapter=_put(float("inf"))),
}
