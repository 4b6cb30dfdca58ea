"""The backends, a folder each; `planner.BACKENDS` lists them."""
