"""Speculative decoding that keeps learning from the traffic it serves."""
