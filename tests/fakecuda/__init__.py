"""CUDA devices that are the CPU: `python tests/fakecuda 2 -m pytest -m gpu`; see README.md."""
