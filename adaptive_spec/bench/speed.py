"""What recording costs, and speculation against plain decoding: one process, all sides in turn, medians and ratios.

``python -m adaptive_spec.bench.speed [--rounds N] [--json FILE]``.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from adaptive_spec.bench.corpora import DOMAINS, prompts
from adaptive_spec.bench.lossless import encode
from adaptive_spec.core import Request, SamplingParams
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.decoding.listeners import Listeners
from adaptive_spec.models.loading import ModelPair, load_pair
from adaptive_spec.records.database import Database
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.records.writer import Writer
from adaptive_spec.settings import DecoderSettings, RecordSettings, load_settings

_CHAIN = 4
_MAX_TOKENS = 48
_SIDES: tuple[tuple[str, bool, int], ...] = (
    ("plain", False, 0),
    ("speculation", False, _CHAIN),
    ("speculation, recorded", True, _CHAIN),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="adaptive_spec.bench.speed", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    settings = load_settings()
    torch.set_num_threads(settings.model.threads or torch.get_num_threads())
    pair = load_pair(settings.model)
    rates = measure(pair, given.rounds, given.batch)
    report = summarise(rates, given.batch)
    for row in report["sides"]:
        print(f"{row['side']:24} {row['tokens_per_second']:7.2f} tokens/s  {row['ratio_to_plain']:.3f} of plain")
    print(f"recording costs {report['recording_cost_share']:.2%} (median of paired rounds)")
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def measure(pair: ModelPair, rounds: int, batch: int) -> dict[str, list[float]]:
    """Tokens per second of each side, one figure per round; the first round warms up and is not counted."""
    rates: dict[str, list[float]] = {side: [] for side, _, _ in _SIDES}
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite:///{folder}/bench.db")
        database.upgrade()
        records = RecordSettings(url=f"sqlite:///{folder}/bench.db", folder=Path(folder) / "traces")
        writer = Writer(database, TraceStore(database, records.folder, records.held_out_share), records)
        heard = Listeners(writer.on_step, writer.on_finish, writer.on_trace, records.trace_top_k)
        decoder = DecoderSettings(slots=batch, max_context_tokens=512, max_chain_length=_CHAIN)
        engines = {True: Engine(pair, decoder, heard), False: Engine(pair, decoder)}
        for engine in engines.values():
            engine.start()
        for number in range(rounds + 1):
            ids = [encode(pair, prompts(domain)[number].text) for domain in DOMAINS]
            order = _SIDES if number % 2 else _SIDES[::-1]
            for side, recorded, chain in order:
                rate = _round(engines[recorded], [ids[i % len(ids)] for i in range(batch)], chain, f"{number}-{side}")
                if number:
                    rates[side].append(rate)
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
        for engine in engines.values():
            engine.stop()
        writer.close()
        database.close()
    return rates


def summarise(rates: dict[str, list[float]], batch: int) -> dict[str, Any]:
    """Medians, ratios to plain decoding by round, and what recording costs by round."""
    sides = [
        {
            "side": side,
            "tokens_per_second": statistics.median(values),
            "ratio_to_plain": statistics.median(v / p for v, p in zip(values, rates["plain"], strict=True)),
        }
        for side, values in rates.items()
    ]
    paired = zip(rates["speculation, recorded"], rates["speculation"], strict=True)
    return {
        "sides": sides,
        "recording_cost_share": statistics.median(1 - recorded / plain for recorded, plain in paired),
        "rates": rates,
        "batch": batch,
        "chain_length": _CHAIN,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _round(engine: Engine, ids: list[tuple[int, ...]], chain: int, label: str) -> float:
    params = SamplingParams(max_tokens=_MAX_TOKENS, chain_length=chain, ignore_eos=True)
    began = time.perf_counter()
    streams = [engine.submit(Request(f"{label}-{index}", row, params)) for index, row in enumerate(ids)]
    tokens = sum(len(stream.collect()[1]) for stream in streams)
    return tokens / (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
