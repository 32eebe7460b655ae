"""Which tensors an object owns, and which objects we refuse."""
