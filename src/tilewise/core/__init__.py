"""The types of a call: its problem, tensors, options, mask rules and plan."""
