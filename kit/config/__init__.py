"""What people write: recipes, cluster profiles, and where models are found."""
