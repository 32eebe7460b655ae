"""Training frameworks, one file each: the tensors behind its wrappers, what may move, and how its weights are published."""
