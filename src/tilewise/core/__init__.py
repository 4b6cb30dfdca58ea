"""What a call is: its problem, tensors, options, mask rules and plan."""
