"""Training data: sequences on disk, their division, and the target's features of them."""
