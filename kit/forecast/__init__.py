"""Forecast memory, time and storage from the shape of a model; README.md lists each term with its source."""
