"""Adapters on disk: what is checked before one touches a draft, and the dense deltas that a decoder merges.

``peft`` itself zero-fills missing tensors and lets wrong shapes break a live model, so nothing here relies on its
loading.  Only safetensors and JSON are read.  Called by ``bundle``, the decoder and ``learning.distil``.
"""

import copy
import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from adaptive_spec.core import Release
from adaptive_spec.errors import ReleaseError
from adaptive_spec.models.weights import LoadedRelease

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
ADVICE = "Do not use this release; roll back (adaptive-spec rollback) or train a new one (adaptive-spec retrain)."

_PREFIX = "base_model.model."
# Everything else in a LoraConfig changes what the tensors mean, and must have its default value.
_FREE_FIELDS = frozenset(
    [
        "r",
        "lora_alpha",
        "lora_dropout",
        "target_modules",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "task_type",
        "inference_mode",
        "base_model_name_or_path",
        "auto_mapping",
        "revision",
        "peft_type",
        "peft_version",
        "runtime_config",
    ]
)


def verify_adapter(folder: Path, draft: PreTrainedModel) -> dict[str, Tensor]:
    """Return the adapter's tensors by their peft names, after checking every one.

    Raises:
        ReleaseError: an unreadable file, a kind of adapter that is not plain LoRA, tensors whose names or shapes are
            not exactly those peft would create for this config on this draft, or values that are not finite.
    """
    return _load(folder, draft)[0]


def load_adapter_delta(folder: Path, draft: PreTrainedModel) -> dict[str, Tensor]:
    """Return the dense change per parameter of ``draft``: name -> B @ A * scaling.

    The tensors are float32, shaped as the parameters and on the draft's device.  Merge into a pristine copy: adding
    and subtracting in bfloat16 drifts.

    Raises:
        ReleaseError: as ``verify_adapter``.
    """
    tensors, scalings = _load(folder, draft)
    deltas: dict[str, Tensor] = {}
    for module, scaling in scalings.items():
        down = tensors[f"{_PREFIX}{module}.lora_A.weight"].to(draft.device, torch.float32)
        up = tensors[f"{_PREFIX}{module}.lora_B.weight"].to(draft.device, torch.float32)
        deltas[f"{module}.weight"] = up @ down * scaling
    return deltas


def load_release(release: Release, draft: PreTrainedModel) -> LoadedRelease:
    """Return a release with the updates of all its adapters.

    Raises:
        ReleaseError: as ``verify_adapter``.
    """
    own = {domain: load_adapter_delta(Path(folder), draft) for domain, folder in release.domain_adapters.items()}
    deltas = load_adapter_delta(Path(release.adapter), draft) if release.adapter else {}
    return LoadedRelease(release, deltas, own)


def _load(folder: Path, draft: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, float]]:
    config = _read_config(folder)
    expected, scalings = _expected(config, draft, folder)
    try:
        tensors = load_file(folder / WEIGHTS_NAME)
    except (OSError, ValueError, SafetensorError) as error:
        raise ReleaseError(f"{folder / WEIGHTS_NAME} cannot be read ({error}). {ADVICE}") from error
    missing, foreign = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or foreign:
        raise ReleaseError(f"{folder} lacks the tensors {missing[:3]} and has foreign ones {foreign[:3]}. {ADVICE}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name]:
            shapes = f"{tuple(tensor.shape)}, the draft needs {tuple(expected[name])}"
            raise ReleaseError(f"{folder}: {name} has shape {shapes}. {ADVICE}")
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise ReleaseError(f"{folder}: {name} holds values that are not finite floats. {ADVICE}")
    return tensors, scalings


def _read_config(folder: Path) -> LoraConfig:
    path = folder / CONFIG_NAME
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if values.get("peft_type") != "LORA":
            raise ValueError("it is not a LoRA adapter")
        config = LoraConfig(**values)
        default = LoraConfig()
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ReleaseError(f"{path} cannot be used ({error}). {ADVICE}") from error
    for name in {field.name for field in fields(LoraConfig)} - _FREE_FIELDS:
        if getattr(config, name) != getattr(default, name):
            raise ReleaseError(f"{path} sets {name}, which only plain LoRA without it supports. {ADVICE}")
    return config


def _expected(
    config: LoraConfig, draft: PreTrainedModel, folder: Path
) -> tuple[dict[str, torch.Size], dict[str, float]]:
    """What peft creates for ``config``: shapes by tensor name, scalings by module name.  No memory is used."""
    try:
        with torch.device("meta"):
            shell = inject_adapter_in_model(config, type(draft)(copy.deepcopy(draft.config)))
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError, re.error) as error:
        raise ReleaseError(f"{folder} does not fit the draft ({error}). {ADVICE}") from error
    shapes: dict[str, torch.Size] = {}
    scalings: dict[str, float] = {}
    for name, module in shell.named_modules():
        if isinstance(module, LoraLayer):
            if not isinstance(getattr(module, "base_layer", None), nn.Linear):
                raise ReleaseError(f"{folder} adapts {name}, which is not a linear layer. {ADVICE}")
            shapes[f"{_PREFIX}{name}.lora_A.weight"] = module.lora_A["default"].weight.shape
            shapes[f"{_PREFIX}{name}.lora_B.weight"] = module.lora_B["default"].weight.shape
            scalings[name] = float(module.scaling["default"])
    if not all(math.isfinite(scaling) for scaling in scalings.values()):
        raise ReleaseError(f"{folder} has a scaling that is not finite. {ADVICE}")
    return shapes, scalings
