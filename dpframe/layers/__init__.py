"""Layers whose numbers depend on the other rows of a batch, or on none: exact on any replicas."""
