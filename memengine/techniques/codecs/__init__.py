"""How a saved tensor is kept in fewer bytes."""
