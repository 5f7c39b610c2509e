"""What survives a fault: signals, processes that die or hang, steps that are not finite."""
