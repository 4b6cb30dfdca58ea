"""The backward pass on GPUs: launches, kernels, and how they are cut."""
