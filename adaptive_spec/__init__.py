"""Speculative decoding that keeps learning from the traffic it serves.

The names of ``__all__`` are the Python API (docs/python.md).  Each is loaded when it is first used, so that
``import adaptive_spec`` costs nothing and the command line starts at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adaptive_spec.core import Release, Request, SamplingParams, Step
    from adaptive_spec.decoding.decoder import Decoder
    from adaptive_spec.decoding.engine import Engine
    from adaptive_spec.decoding.listeners import Listeners
    from adaptive_spec.decoding.slot import Delta, Usage
    from adaptive_spec.errors import AdaptiveSpecError
    from adaptive_spec.models.loading import ModelPair, load_pair
    from adaptive_spec.service import Service
    from adaptive_spec.settings import Settings, load_settings

__all__ = [
    "AdaptiveSpecError",
    "Decoder",
    "Delta",
    "Engine",
    "Listeners",
    "ModelPair",
    "Release",
    "Request",
    "SamplingParams",
    "Service",
    "Settings",
    "Step",
    "Usage",
    "load_pair",
    "load_settings",
]

_ROOMS = {
    "core": ("Release", "Request", "SamplingParams", "Step"),
    "decoding.decoder": ("Decoder",),
    "decoding.engine": ("Engine",),
    "decoding.listeners": ("Listeners",),
    "decoding.slot": ("Delta", "Usage"),
    "errors": ("AdaptiveSpecError",),
    "models.loading": ("ModelPair", "load_pair"),
    "service": ("Service",),
    "settings": ("Settings", "load_settings"),
}

if not TYPE_CHECKING:  # type checkers read the imports above, and know of no other name

    def __getattr__(name: str) -> Any:
        for room, names in _ROOMS.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{room}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
