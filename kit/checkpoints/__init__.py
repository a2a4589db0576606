"""Inspect checkpoints, time loading and saving, and plan how often to save."""
