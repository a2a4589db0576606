"""Formats of weight files, one module each: `read_headers(files)` describes tensors, `pieces(weights)` locates them."""
