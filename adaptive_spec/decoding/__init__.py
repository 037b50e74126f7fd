"""The live decoder: ragged KV cache, the step loop, the engine thread.  Knows nothing of the database."""
