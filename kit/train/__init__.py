"""The job's side: `python -m kit.train RUN` on every rank."""
