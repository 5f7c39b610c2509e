"""What survives a fault: steps that are not finite, kept out and kept to be looked at."""
