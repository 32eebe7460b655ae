"""Benchmarks. Each module answers a question and writes `results/NAME.json`. `python -m bench.run
--full` runs all the machine can."""
