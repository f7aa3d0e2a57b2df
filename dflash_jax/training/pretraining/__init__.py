"""A target from nothing: sequences of the recall rule, and next-token prediction on them."""
