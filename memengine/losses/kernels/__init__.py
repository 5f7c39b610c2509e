"""Triton kernels of the losses; the module states what of the eager forms it stands for."""
