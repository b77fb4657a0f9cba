"""What comes with dpframe and is no part of its core: found by entry points, as any package's."""
