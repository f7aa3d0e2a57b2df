"""The objective: anchors, the draft's training forward, the LM head and the losses."""
