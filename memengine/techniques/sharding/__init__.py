"""Parameters, gradients and optimiser state spread over ranks."""
