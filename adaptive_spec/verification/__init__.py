"""Pure tensor functions that decide how much of a chain is kept."""
