"""`tilewise bench`: speed on this machine, compared with other libraries and the limits of the hardware."""
