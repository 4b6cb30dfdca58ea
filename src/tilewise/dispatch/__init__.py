"""Who serves a call: the planner, and the cache of calls that were planned before."""
