"""One file a training framework: what it does to a module or an optimizer, what may move, and how its weights are published."""
