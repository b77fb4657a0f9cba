"""The Hydra configs, importable as pkg://dpframe.conf."""
