"""What a run survives, or ends at in good order."""
