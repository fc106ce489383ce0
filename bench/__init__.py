"""Benchmarks: one module each, run with `python -m bench.NAME` or `make bench-NAME`; each prints JSON objects, one a line."""
