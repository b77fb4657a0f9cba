"""What is looked at before and while a task trains, so that no number is wrong unseen."""
