"""What GPUs can compute at most."""

# Dense bf16 products, TFLOP/s, by what the GPU's name contains.
PEAKS = {
    "H200": 989,
    "H100 PCIe": 756,
    "H100 80GB HBM3": 989,
    "H100 SXM": 989,
    "A100": 312,
}
OTHERS = ("NVL", "MIG")  # of these names, and with another peak: fewer watts, or a part of a GPU


def peak_flops(gpu: str) -> float | None:
    """In bf16, dense, a second; None for a GPU that is not in the table."""
    if any(word in gpu for word in OTHERS):
        return None
    return next((1e12 * peak for name, peak in PEAKS.items() if name in gpu), None)
