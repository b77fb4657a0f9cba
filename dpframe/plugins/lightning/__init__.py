"""`recipe=lightning`: the task and the data, for modules of Lightning's as they are."""
