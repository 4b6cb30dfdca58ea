"""The backward pass of wide heads on Hopper: one kernel, launched for dQ and for dK with dV."""
