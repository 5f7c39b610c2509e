import sys

import pytest


@pytest.fixture
def device():
    """What counts, refuses and delays; without the plugin there may be a GPU, which cannot."""
    loaded = sys.modules.get('tests.simulated_gpu.device')
    if loaded is None:
        pytest.skip('needs the simulated GPU: make gpu-sim')
    return loaded
