"""What is said of a config before torch and MMEngine are imported, which takes seconds."""
