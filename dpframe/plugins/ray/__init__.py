"""`strategy=ray`: ddp in workers of Ray Train."""
