"""Forecast memory, time and storage from the shape of a model."""
