"""Drafts before and after training: fresh configs and weights, feature scales, means of drafts."""
