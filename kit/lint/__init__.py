"""Check sbatch scripts for faults. Independent of the other rooms, but for errors, files and results."""
