"""The backward pass on GPUs: launches, kernels and launch heuristics."""
