"""Validation: turns the arguments of a call into a `Problem` and its `Tensors`. Every check of an argument is here."""
