"""Code generation: vector instructions as Python that emits LLVM, loads and stores, prefetch."""
