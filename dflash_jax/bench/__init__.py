"""Measuring: the same requests with and without speculation, at growing concurrency."""
