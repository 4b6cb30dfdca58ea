"""Arguments in, a `Problem` and its `Tensors` out: every check of an argument."""
