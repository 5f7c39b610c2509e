"""What all techniques share: which modules, wrapped forwards, saved tensors, random state."""
