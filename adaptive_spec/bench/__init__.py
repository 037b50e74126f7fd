"""Side-by-side comparisons on real text, the lossless check and the demo."""
