"""An adapter and nothing else: recorded traces in, a plain peft folder out.

For people who serve elsewhere.  Called by ``distil``; needs no service, publishes no release.  It trains as a run does,
on all cores of the caller, and judges the result on the held-out traces of every domain.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from adaptive_spec.errors import NotEnoughDataError, SettingsError
from adaptive_spec.learning.acceptance import figures, sums_of
from adaptive_spec.learning.batches import completion_length
from adaptive_spec.learning.distil import distil
from adaptive_spec.learning.evaluate import judge
from adaptive_spec.learning.run import REPORT_NAME, provenance
from adaptive_spec.learning.selection import split
from adaptive_spec.models.loading import load_pair
from adaptive_spec.records.database import Database
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.releases.adapter import verify_adapter
from adaptive_spec.settings import Settings

BEFORE, AFTER = "before", "after"
_UNFINISHED = ".unfinished"


def distil_adapter(
    settings: Settings,
    out: Path,
    *,
    domain: str | None = None,
    chain_length: int = 4,
    progress: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Train an adapter on the traces of the settings' database and write it to ``out``, whole or not at all.

    Args:
        out: a folder that is not there yet, or is empty.  It gets what peft saves, and the report as ``distil.json``.
        domain: train on its traces alone; the held-out ones of all domains are judged either way.
        chain_length: tokens of each chain when judged.

    Returns:
        The report: domain, chain_length, held_out (records as of ``acceptance.figures``, drafts ``before`` and
        ``after``), distil (what the training did) and provenance.

    Raises:
        NotEnoughDataError: fewer traces than ``learning.min_traces``, or none held out.
        SettingsError: the folder holds something.
        AdaptiveSpecError: the database, a model or the run fails.
    """
    _check_free(out)
    torch.set_num_threads(settings.model.threads or torch.get_num_threads())
    database = Database(settings.records.url)
    try:
        database.check()
        store = TraceStore(database, settings.records.folder, settings.records.held_out_share)
        traces = store.load(held_out=False, domains=None if domain is None else [domain])
        held_out = [trace for trace in store.load(held_out=True) if completion_length(trace) > 0]
    finally:
        database.close()
    if len(traces) < settings.learning.min_traces or not held_out:
        whose = "" if domain is None else f" of domain {domain!r}"
        raise NotEnoughDataError(
            f"{len(traces)} traces{whose} to train on and {len(held_out)} held out; {settings.learning.min_traces} and "
            "1 are needed. Record more requests, or lower learning.min_traces."
        )
    progress({"phase": "load"})
    pair = load_pair(settings.model)
    draft, hashes = pair.draft, pair.hashes
    del pair  # the target's own layers are not needed
    progress({"phase": "judge"})
    before = judge(draft, held_out, heats=(1.0,))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft's own
        model, trained = distil(draft, *split(traces), settings.learning, progress)
    for config in model.peft_config.values():
        config.base_model_name_or_path = settings.model.draft  # a cut draft has its target's name
    progress({"phase": "judge"})
    after = judge(model, held_out, heats=(1.0,))
    sums = {name: sums_of(judged, chain_length) for name, judged in ((BEFORE, before), (AFTER, after))}
    report = {
        "domain": domain,
        "chain_length": chain_length,
        "held_out": list(figures(sums, [(AFTER, BEFORE)])),
        "distil": trained.to_dict(),
        "provenance": {
            **provenance(settings, traces, 0, dict(hashes)),
            "target": settings.model.target,
            "draft": settings.model.draft,
        },
    }
    building = out.with_name(out.name + _UNFINISHED)
    try:
        model.save_pretrained(str(building), safe_serialization=True, save_embedding_layers=False)
        (building / REPORT_NAME).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        verify_adapter(building, draft)
        os.replace(building, out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return report


def _check_free(out: Path) -> None:
    """Refuse before the training what could not be written after it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SettingsError(f"{out} holds something already. Name a new folder with --out.")
    if not out.absolute().parent.is_dir():
        raise SettingsError(f"The folder of {out} does not exist. Make it, or name another with --out.")
