"""How the task computes: number formats, the compiler, and activations that are computed again."""
