"""An update: the optimizers and whose turn it is, their steps, rates, schedules and state."""
