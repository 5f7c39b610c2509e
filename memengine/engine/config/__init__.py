"""Reading and checking a config before anything is built."""
