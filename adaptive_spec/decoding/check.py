"""What a request must be like to be decoded."""

from adaptive_spec.core import (
    DRAFTERS,
    LEAST_REPETITION_PENALTY,
    MOST_REPETITION_PENALTY,
    VERIFIERS,
    Request,
)
from adaptive_spec.errors import RequestError
from adaptive_spec.settings import DecoderSettings, VerificationSettings

_MOST_LOGPROBS = 20  # as many as OpenAI's API gives
_MOST_CHOICES = 8


def check_request(
    request: Request, settings: DecoderSettings, verification: VerificationSettings, vocab_size: int
) -> None:
    """Raise RequestError for a request that cannot be served as asked."""
    params, limit = request.params, settings.max_context_tokens
    if not request.prompt_ids:
        raise RequestError("The prompt is empty; send at least one token.")
    if len(request.prompt_ids) + params.max_tokens > limit:
        raise RequestError(
            f"Prompt ({len(request.prompt_ids)} tokens) plus max_tokens ({params.max_tokens}) exceeds the context "
            f"of {limit} tokens. Shorten one of them or raise decoder.max_context_tokens."
        )
    if not all(0 <= token < vocab_size for token in request.prompt_ids):
        raise RequestError(f"Prompt token ids must lie in [0, {vocab_size}).")
    if params.max_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1 or params.top_k < 0:
        raise RequestError(
            "Need max_tokens >= 1, temperature >= 0, 0 < top_p <= 1 and top_k >= 0; correct the request."
        )
    if not 0 <= params.min_p <= 1:
        raise RequestError("Need 0 <= min_p <= 1; correct the request.")
    if not LEAST_REPETITION_PENALTY <= params.repetition_penalty <= MOST_REPETITION_PENALTY:
        raise RequestError(
            f"repetition_penalty must lie in [{LEAST_REPETITION_PENALTY}, {MOST_REPETITION_PENALTY:g}]; correct it."
        )
    if not (-2 <= params.presence_penalty <= 2 and -2 <= params.frequency_penalty <= 2):
        raise RequestError("presence_penalty and frequency_penalty must lie in [-2, 2]; correct the request.")
    if params.chain_length is not None and not 0 <= params.chain_length <= settings.max_chain_length:
        raise RequestError(f"chain_length must lie in [0, {settings.max_chain_length}] or be left out.")
    if params.drafter is not None and params.drafter not in DRAFTERS:
        raise RequestError(f"drafter {params.drafter!r} is unknown; choose one of {', '.join(DRAFTERS)}.")
    if params.verifier is not None and params.verifier not in VERIFIERS:
        raise RequestError(f"verifier {params.verifier!r} is unknown; choose one of {', '.join(VERIFIERS)}.")
    if params.verifier is not None and not verification.permits(params.verifier, request.domain):
        raise RequestError(
            f"verifier {params.verifier!r} is not allowed here, because it may change the answer; leave it out, or "
            "have the operator add it to verification.allowed."
        )
    if not 1 <= params.n <= _MOST_CHOICES:
        raise RequestError(f"n must lie in [1, {_MOST_CHOICES}]; send several requests for more.")
    if params.logprobs is not None and not 0 <= params.logprobs <= min(_MOST_LOGPROBS, vocab_size):
        raise RequestError(f"logprobs must lie in [0, {_MOST_LOGPROBS}] or be left out.")
    if params.deadline_seconds is not None and not params.deadline_seconds > 0:
        raise RequestError("deadline_seconds must be greater than 0, or left out for none.")
