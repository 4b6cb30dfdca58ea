"""Functions of the user as small graphs: see README.md."""
