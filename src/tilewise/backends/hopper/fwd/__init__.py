"""Prefill on Hopper: the forward kernel and its launches."""
