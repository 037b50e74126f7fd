"""Judged traces made up from probabilities of acceptance, without a model."""

from dataclasses import replace

import numpy as np
import torch

from adaptive_spec.learning.evaluate import JudgedTrace
from tests.learning.toy import toy_traces

_TRACE = toy_traces(1, seed=0)[0]


def judged(name: str, agrees: list[bool], overlap: list[float] | None = None, domain: str = "code") -> JudgedTrace:
    shared = torch.tensor([float(same) for same in agrees] if overlap is None else overlap)
    return JudgedTrace(
        replace(_TRACE, domain=domain, request_id=name), agrees, shared, [0.5] * len(agrees), 0.5 * shared[:, None]
    )


def domain_of(
    shares: list[float], num_requests: int, seed: int, domain: str = "code", num_tokens: int = 40
) -> list[list[JudgedTrace]]:
    """One list per draft, all of the same requests; a draft agrees at a position with its share, easy requests more."""
    random = np.random.default_rng(seed)
    ease = random.normal(0, 0.1, num_requests)
    return [
        [
            judged(f"{domain}-{i}", (random.random(num_tokens) < share + ease[i]).tolist(), domain=domain)
            for i in range(num_requests)
        ]
        for share in shares
    ]
