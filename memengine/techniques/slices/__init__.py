"""Steps in slices of the batch, and what is done when even they run out of memory."""
