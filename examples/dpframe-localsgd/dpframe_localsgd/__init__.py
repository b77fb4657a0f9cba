"""Local SGD, a strategy for dpframe."""
