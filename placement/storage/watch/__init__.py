"""Parts that watch an object's tensors beside its moves."""
