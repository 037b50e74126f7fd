"""What a client is told of a failure inside the engine.  The log has the rest."""

import torch

from adaptive_spec.errors import AdaptiveSpecError, DecodingError, UnavailableError

# What torch's allocators say in a plain RuntimeError: DefaultCPUAllocator on Linux and on Windows, CUDA, mmap.
_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out, on the device or off it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def failure(error: Exception) -> AdaptiveSpecError:
    """Return the error for the client of a request that failed; frees what a CUDA device can spare."""
    if is_out_of_memory(error):
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        told: AdaptiveSpecError = UnavailableError(
            "The service ran out of memory on this request. Send it again later; if that persists, lower "
            "decoder.slots or decoder.max_context_tokens."
        )
    elif isinstance(error, AdaptiveSpecError):
        return error
    else:
        told = DecodingError("Decoding this request failed; the service's log says how. Send it again.")
    told.__cause__ = error
    return told
