"""Files, patterns and traces: what knows nothing of training."""
