"""Triton kernels of the codecs; each module states what of the eager forms it stands for."""
