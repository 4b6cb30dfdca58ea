"""Prefill in float8 on Hopper: q, k and v in e4m3. No call is planned for it: it has not been measured on a GPU yet
(benchmarks/h200/fp8_prefill.py).
"""
