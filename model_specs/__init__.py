"""Frozen pydantic models: what a run is, as data. Imports nothing of the other packages."""
