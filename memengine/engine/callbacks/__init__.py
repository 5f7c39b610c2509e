"""Techniques of a model as callbacks of other libraries' trainers, a module for each library."""
