"""How the processes of a job start, hear signals and end."""
