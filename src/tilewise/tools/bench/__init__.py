"""`tilewise bench`: how fast this machine is, beside what else it could run and what its hardware allows."""
