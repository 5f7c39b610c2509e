"""Ranks that torchrun starts again find each other, not those that died."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

RANK = """
import os, sys, time
import torch, torch.distributed as dist
from memengine.engine.distributed.processes import init_process_group
if os.environ['RANK'] == '1':
    time.sleep(float(sys.argv[1]))
init_process_group('pytorch', {'timeout': 60})
total = torch.ones(1)
dist.all_reduce(total)
print(int(total), flush=True)
os._exit(0)  # as if it were killed: nothing is taken back
"""


def start(port, count, delay_s):
    """Two ranks, of which the second is slower; what they print."""
    shared = {
        **os.environ,
        'CUDA_VISIBLE_DEVICES': '',
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': str(port),
        'WORLD_SIZE': '2',
        'LOCAL_WORLD_SIZE': '2',
        'TORCHELASTIC_USE_AGENT_STORE': 'True',
        'TORCHELASTIC_RESTART_COUNT': str(count),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, '-c', RANK, str(delay_s)],
            env={**shared, 'RANK': str(rank), 'LOCAL_RANK': str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=200) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), outputs
    return [output.strip() for output, _ in outputs]


@pytest.mark.slow
def test_a_restart_does_not_look_for_the_dead():
    """The agent's store is the same for both; without a place of its own the second one fails."""
    store = dist.TCPStore('127.0.0.1', 0, is_master=True, timeout=timedelta(seconds=60))
    assert start(store.port, 0, delay_s=0) == ['2', '2']
    assert start(store.port, 1, delay_s=5) == ['2', '2']
