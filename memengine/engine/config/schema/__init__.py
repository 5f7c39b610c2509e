"""What a config may hold, and the comparison with what it does."""
