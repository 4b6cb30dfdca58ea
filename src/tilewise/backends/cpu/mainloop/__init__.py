"""The loops over keys (prefill, decode) and their parts: masks, scores, softmax, epilogue, non-finite fix-up."""
