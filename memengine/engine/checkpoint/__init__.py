"""Writing and reading checkpoints."""
