"""Execute, sweep, replay and compare notebooks and runs."""
