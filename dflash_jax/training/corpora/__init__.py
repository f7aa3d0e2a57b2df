"""Corpora: conversations that the target writes, and the shards that training reads."""
