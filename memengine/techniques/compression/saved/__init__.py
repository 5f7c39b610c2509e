"""What is held of the tensors that operations save: as they are, or in codes of their memory."""
