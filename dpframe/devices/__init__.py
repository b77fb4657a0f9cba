"""A device and its memory, and what a container allows."""
