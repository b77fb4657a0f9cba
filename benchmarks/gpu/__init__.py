"""What a step costs on this machine's GPUs: dpframe beside a tuned loop and Lightning."""
