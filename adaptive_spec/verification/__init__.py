"""Pure tensor functions that decide how much of a chain is kept, and say what a relaxed decision gave up.

A rule answers, for each position of a chain, whether the token there passes: a tensor of bools [rows, chain].  ``kept``
makes of it how many tokens a row keeps.
"""
