"""Benchmarks: one module a question, each writes `results/NAME.json`. `python -m bench.run --full` runs all that the machine can."""
