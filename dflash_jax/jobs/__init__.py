"""Batch generation from a config: read, run, write, resume, report."""
