"""What a checkpoint holds of a run, and whether a run is the one that it was written by."""
