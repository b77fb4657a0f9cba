"""What a command does: one file a mode, and the run directory that it writes into."""
