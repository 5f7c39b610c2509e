"""GPU tests say why they do not run; one thread for each of the processes that share the cores."""

import os

os.environ.setdefault('OMP_NUM_THREADS', '1')  # before torch is imported

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason='needs a CUDA device, and this machine has none')
    for item in items:
        if 'gpu' in item.keywords:
            item.add_marker(skip)
