"""Registers, spills and code size of Metal kernels, as Mesa's compiler for Apple's GPUs makes them: README.md."""
