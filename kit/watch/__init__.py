"""Read metrics and show runs while they train."""
