"""What every backend must pass: cases against the oracle, and properties that hold to the bit."""
