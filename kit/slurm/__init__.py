"""Launch runs with Slurm or on this machine, and determine how they end."""
