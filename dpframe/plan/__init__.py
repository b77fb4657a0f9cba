"""What a recipe would cost on more replicas: measured on one, computed for the others."""
