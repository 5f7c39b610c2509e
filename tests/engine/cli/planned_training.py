"""A plan's printed line, measured and carried out: ``python -m tests.engine.cli.planned_training``.

It is to be called in a process of its own, as the kernel counts all of it.
"""

import contextlib
import io
import json
import shlex
import sys

from mmengine.device import get_device

from memengine.engine.cli.commands import read_config
from memengine.engine.cli.main import main
from memengine.engine.cli.parser import make_parser
from memengine.engine.config.planning import budget_for
from memengine.engine.config.step_of_config import first_batch, step_of
from memengine.memory import UnpredictableError, map_blocks_singly, measure, predict


def step(arguments):
    """What builds the training step of a command line."""
    cfg = read_config(make_parser().parse_args(['measure', *arguments]))
    return step_of(cfg, first_batch(cfg))


def planned(config, share, options):
    """A budget, the line that is printed for it, what its step takes, whether it trains."""
    as_stated = [config, *(['--cfg-options', *options] if options else [])]
    as_it_is = step(as_stated)
    try:
        plain = predict(as_it_is).peak_bytes
    except UnpredictableError:
        as_it_is().run()
        plain = measure(as_it_is, get_device()).peak_bytes
    budget = int(share * budget_for(plain))
    command = ['plan', config, '--budget', f'{budget / 1000}KB', *as_stated[1:]]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(command) == 0
    lines = said.getvalue().splitlines()
    (line,) = (line for line in lines if line.startswith('memengine train'))
    program, train, *arguments = shlex.split(line)
    assert (program, train) == ('memengine', 'train')
    peak = measure(step(arguments), get_device()).peak_bytes
    run = [*arguments, '--max-iters', '2', '--work-dir', 'run']
    return {'budget': budget, 'line': line, 'peak': peak, 'trained': main(['train', *run]) == 0}


if __name__ == '__main__':
    if get_device() == 'cpu':
        map_blocks_singly()
    result = planned(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
    print(json.dumps(result))
