"""Check sbatch scripts for faults."""
