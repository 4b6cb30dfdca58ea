"""The conformance suite that every backend must pass: cases against the oracle, and properties to the bit."""
