"""One folder or module a backend; `planner.BACKENDS` lists them."""
