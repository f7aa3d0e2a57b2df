"""Text on either side of the token ids: detokenisation, stop strings, chat templates."""
