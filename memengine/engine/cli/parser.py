"""The options of the command line, and what is said to a misspelt one."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Iterable
from typing import Any, NoReturn

import memengine
from memengine.engine.cli.values import ValueSyntaxError, parse_value, replacements

__all__ = ['AFTER_TRAINING', 'make_parser']

AFTER_TRAINING = {  # what each command does
    'probe': 'measure features: linear probe, k-NN, few-shot',
    'embed': 'write features to files',
    'zeroshot': 'classify images by texts, with a model of both',
    'retrieve': 'find images by texts and texts by images: recall',
    'look': 'draw nearest neighbours, a map, attention and patches',
    'export': 'write the backbone for other libraries and runtimes',
}


FIRST_STEPS = """\
first steps:
  memengine train dino_vit   a small ViT on images that come along, in two minutes
  memengine techniques       the ways to save memory, and what to type for each
  memengine train --help     options of a command, with examples
"""
TRAIN_EXAMPLES = """\
examples:
  memengine train dino_vit
  memengine train dino_vit --cfg-options optim_wrapper.optimizer.lr=1e-3
  memengine train dino_vit --resume --amp bf16
  torchrun --nproc_per_node 2 tools/train.py configs/dino_vit.py --launcher pytorch

A module that the config's custom_imports names is looked for on PYTHONPATH, in the current folder
and in the config's.
"""
TEST_EXAMPLES = """\
examples:
  memengine test dino_vit work_dirs/dino_vit/epoch_60.pth
  memengine test dino_vit last.pth --cfg-options test_dataloader.batch_size=64
"""
CONVERT_EXAMPLES = """\
examples:
  memengine convert work_dirs/dino_vit/epoch_60.dcp dino_vit.safetensors
  memengine convert work_dirs/dino_vit/epoch_60.dcp epoch_60.pth
  memengine convert epoch_60.pth epoch_60.dcp

.dcp and .pth hold all of a run, and training goes on from either; .safetensors holds the weights.
"""
PLAN_EXAMPLES = """\
examples:
  memengine plan simclr_vit --budget 40MiB
  memengine plan simclr_vit --budget 40MiB --batch 512 --write simclr_40mib.py
  memengine plan simclr_vit --budget 40MiB --max-batch
  memengine plan clip_vit --budget 20MiB --batch 512 --gpus 8
  memengine plan simclr_vit --fit balanced --plot plans.png
"""
REPLAY_EXAMPLES = """\
examples:
  memengine replay work_dirs/dino_vit/nonfinite/iter_7.pth
  torchrun --nproc_per_node 2 -m memengine replay FILE --launcher pytorch

The file is data and read as such; the config beside it is code, as every config. For a file that
somebody else gave you, name your own config with --config.
"""


class _Parser(argparse.ArgumentParser):
    """A parser that names the nearest real option or command for a misspelt one."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and exit with status 2."""
        if 'invalid choice' in message:
            message += _hint(message.split("'")[1], self._known_words(''))
        super().error(message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, refusing what is left over with a suggestion."""
        parsed, left = self.parse_known_args(args, namespace)
        if left:
            unknown = next((word for word in left if word.startswith('-')), left[0])
            option = unknown.partition('=')[0]
            parser: _Parser = getattr(parsed, 'parser', self)
            parser.error(f'unknown argument {option}{_hint(option, parser._known_words("--"))}')
        return parsed

    def _known_words(self, prefix: str) -> Iterable[str]:
        for action in self._actions:
            for word in (*action.option_strings, *(action.choices or ())):
                if word.startswith(prefix) and action.help is not argparse.SUPPRESS:
                    yield word


def _hint(word: str, words: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(words))
    return f': did you mean {" or ".join(found)}?' if found else ''


class _ParseOptions(argparse.Action):
    """``KEY=VALUE ...``; see :mod:`memengine.engine.cli.values`."""

    def __call__(
        self,
        parser: Any,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        options = dict(getattr(namespace, self.dest) or {})
        for pair in values:
            key, equals, text = pair.partition('=')
            if not equals or not key:
                where = '; CONFIG goes before it' if os.path.exists(pair) else ''
                parser.error(f'--cfg-options wants KEY=VALUE, got {pair!r}{where}')
            try:
                options[key] = parse_value(text)
            except ValueSyntaxError as error:
                parser.error(
                    f'--cfg-options {key}: {text!r} is no value: {error}; a list is [a,b], a tuple '
                    '(a,b), a dict dict(a=1), and text with brackets stands in quotes: "\'a)\'"'
                )
        setattr(namespace, self.dest, replacements(options))


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _Parser(
        prog='memengine',
        description='Train and test models whose memory is a config option.',
        epilog=FIRST_STEPS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument('--version', action='version', version=f'memengine {memengine.__version__}')
    commands = parser.add_subparsers(dest='command', metavar='COMMAND')
    train = _add_command(commands, 'train', 'train a model from a config', TRAIN_EXAMPLES)
    _add_config(train)
    train.add_argument(
        '--resume',
        nargs='?',
        const=True,
        metavar='PATH',
        help='go on from the checkpoint PATH, or from the latest one in the work dir (also: auto)',
    )
    train.add_argument('--amp', choices=['bf16', 'fp16'], help='train in mixed precision')
    train.add_argument('--seed', type=int, help='seed of everything random (randomness.seed)')
    train.add_argument(
        '--deterministic', action='store_true', help='use deterministic algorithms (may be slower)'
    )
    train.add_argument(
        '--max-iters',
        type=int,
        metavar='N',
        help="save and stop after iteration N; schedules still aim at the config's end",
    )
    train.add_argument(
        '--track',
        action='append',
        choices=['tensorboard', 'wandb', 'mlflow'],
        help='send the curves there, too; wandb stays offline unless WANDB_MODE=online',
    )
    _add_common(train)
    test = _add_command(commands, 'test', 'test a checkpoint', TEST_EXAMPLES)
    _add_config(test)
    test.add_argument('checkpoint', metavar='CHECKPOINT', help='the checkpoint to test')
    _add_common(test)
    data = _add_command(
        commands,
        'data',
        'draw what the model sees, and say whether data or model is slower',
        'example:\n  memengine data dino_vit',
    )
    _add_config(data)
    data.add_argument('--work-dir', metavar='DIR', help='for DIR/data/views.png')
    _add_options(data)
    _add_memory_commands(commands)
    for name, does in AFTER_TRAINING.items():
        _add_after(commands, name, does)
    _add_commands_on_files(commands)
    listing = _add_command(
        commands, 'techniques', 'list the ways to save memory, or say all of one'
    )
    listing.add_argument('name', metavar='NAME', nargs='?', help='a technique, such as dropit')
    return parser


def _add_memory_commands(commands: Any) -> None:
    for name, does in (
        ('predict', 'predict the memory of a training step, without taking it'),
        ('measure', 'measure the memory of real training steps'),
        ('memory', 'draw and explain the memory of a training step, beside each technique'),
    ):
        command = _add_command(commands, name, does, f'example:\n  memengine {name} dino_vit')
        _add_config(command)
        command.add_argument('--json', action='store_true', help='print figures in bytes')
        if name == 'memory':
            command.add_argument('--work-dir', metavar='DIR', help='for DIR/report/memory')
        if name == 'predict':
            _add_ranks(command)
        _add_options(command)
    plan = _add_command(
        commands, 'plan', 'say what to switch on so that training fits a budget', PLAN_EXAMPLES
    )
    _add_config(plan)
    room = plan.add_mutually_exclusive_group(required=True)
    room.add_argument('--budget', metavar='SIZE', help='what a training step may take, as 24GiB')
    room.add_argument(
        '--fit',
        metavar='SHARE',
        help='of the bytes between the leanest plan (0 or least) and the step as it is (1 or '
        'fastest); 0.5 is balanced',
    )
    batch = plan.add_mutually_exclusive_group()
    batch.add_argument(
        '--batch', type=int, metavar='N', help='images or pairs in a batch, of all GPUs together'
    )
    batch.add_argument(
        '--max-batch', action='store_true', help='plan for the largest batch that fits the budget'
    )
    plan.add_argument(
        '--allow',
        choices=['exact', 'rounding', 'lossy'],
        default='exact',
        help='techniques that leave what is learned as it is (exact), other precisions too '
        '(rounding), or also activations in 8 or 4 bits (lossy)',
    )
    plan.add_argument(
        '--objective',
        choices=['throughput'],
        default='throughput',
        help='what a plan is chosen by, among those that fit: there is but one',
    )
    _add_ranks(plan)
    plan.add_argument('--plot', metavar='FILE', help='draw the plans that no other beats, as a PNG')
    plan.add_argument('--write', metavar='FILE', help='write the config with the plan in it')
    plan.add_argument('--json', action='store_true', help='print figures in bytes')
    _add_options(plan)


def _add_ranks(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        '--gpus', type=_count, default=1, metavar='N', help='processes on a machine, one for a GPU'
    )
    command.add_argument('--nodes', type=_count, default=1, metavar='N', help='machines')


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f'expected at least 1, got {text}')
    return number


def _add_after(commands: Any, name: str, does: str) -> None:
    settings = f'Settings are keys of the config: {name}.KEY=VALUE.'
    parser = _add_command(commands, name, does, settings)
    parser.add_argument('run', metavar='RUN', help='the folder of a run, or a checkpoint in it')
    parser.add_argument('--config', metavar='CONFIG', help="the run's config (in its folder)")
    parser.add_argument('--work-dir', metavar='DIR', help=f'for results (RUN/report/{name})')
    if name == 'export':
        parser.add_argument('--part', metavar='MODULE', help='as teacher.backbone (export.part)')
        parser.add_argument(
            '--to',
            nargs='+',
            choices=('weights', 'onnx', 'torch_export', 'open_clip'),
            metavar='FORM',
            help='weights (named as timm, torchvision or transformers do, whichever has the '
            'network), onnx, torch_export; or open_clip (export.to)',
        )
    _add_options(parser)


def _add_commands_on_files(commands: Any) -> None:
    convert = _add_command(
        commands,
        'convert',
        'turn a checkpoint into another form: one file, or sharded',
        CONVERT_EXAMPLES,
    )
    convert.add_argument('source', metavar='SOURCE', help='a .dcp folder, .pth or .safetensors')
    convert.add_argument('target', metavar='TARGET', help='a name that ends in one of these')
    does = 'compare checkpoints with their checksums; the status is 1 if one is damaged'
    verify = _add_command(commands, 'verify', does)
    verify.add_argument('path', metavar='PATH', help='a checkpoint, or a folder of some')
    does = 'carry out again a step that was not finite, and name where that begins'
    replay = _add_command(commands, 'replay', does, REPLAY_EXAMPLES)
    replay.add_argument('file', metavar='FILE', help='nonfinite/iter_N.pth in the work dir')
    replay.add_argument('--config', metavar='CONFIG', help="the run's config (beside FILE)")
    _add_options(replay)


def _add_command(commands: Any, name: str, does: str, below: str = '') -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=does,
        description=f'{does.capitalize()}.',
        epilog=below,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser)
    parser.add_argument('--debug', action='store_true', help='show the traceback of an error')
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'config', metavar='CONFIG', help='a file, or a config that comes along, as dino_vit'
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--work-dir',
        metavar='DIR',
        help='for logs and checkpoints (work_dirs/<name of the config>)',
    )
    amount = parser.add_mutually_exclusive_group()
    for console, says in (
        ('quiet', 'say nothing on the console but warnings and errors'),
        ('verbose', 'say on the console, too, what goes to the log file only'),
    ):
        amount.add_argument(
            f'--{console}', dest='console', action='store_const', const=console, help=says
        )
    _add_options(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=_ParseOptions,
        metavar='KEY=VALUE',
        help='set entries of the config, as optim_wrapper.optimizer.lr=1e-3 or '
        'param_scheduler.0.end=5; a list is [a,b], a tuple (a,b)',
    )
    parser.add_argument(
        '--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], help='what started the processes'
    )
    parser.add_argument('--local-rank', '--local_rank', type=int, help=argparse.SUPPRESS)
