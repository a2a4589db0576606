"""Trainers: what each renders for a recipe, its config files and the command that starts the ranks of a node."""
