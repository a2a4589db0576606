"""Export, merge, push and evaluate what a run has trained."""
