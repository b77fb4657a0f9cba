"""dpframe-plan: what more replicas would bring, as a mode of dpframe."""
