"""Training, the side of the job: `python -m kit.train RUN` on every rank, and a sampler on every node."""
