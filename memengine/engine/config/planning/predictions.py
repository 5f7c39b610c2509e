"""What training steps of a config cost: predicted, each once; of a deep model on few blocks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from mmengine.config import Config
from torch import Tensor, nn

from memengine._torch_private.ops import pytree
from memengine.engine.config.check import check_config
from memengine.engine.config.file import merge_options
from memengine.engine.config.planning.copied_processes import Copies
from memengine.engine.config.planning.open_knobs import CHECKPOINTED_BUDGET
from memengine.engine.config.step_of_config import FewSamples, step_of
from memengine.memory import UnpredictableError
from memengine.memory.live_memory import KnownOperators
from memengine.memory.planning import Cost
from memengine.memory.prediction import Phase, carried_out, made_once, peaks_by_phase, prediction_of
from memengine.techniques.modules.depth import FEWEST, lists_of_blocks, place_of

_OPERATORS_UNDER_MODES = 3
_PLAIN = (str, bytes, int, float, bool, type(None))  # what nothing can change in
_DEEP = 8  # blocks in a list: what more of them cost follows from three and four
_BATCH_SIZE = 'train_dataloader.batch_size'
_ASKED_FOR = Cost(0, 0, 0, 0)  # in place of what is being predicted

T = TypeVar('T')
_Key: TypeAlias = tuple[tuple[str, Any], ...]
_Predicted: TypeAlias = tuple[Cost | None, str]  # and why it is refused


def sum_of(
    parts: Sequence[tuple[float, Cost | None]],
    how: Callable[[Sequence[tuple[float, Cost]]], Cost] = Cost.sum,
) -> Cost | None:
    """Of several costs; None if one of them is refused."""
    known = [(weight, cost) for weight, cost in parts if cost is not None]
    return how(known) if len(known) == len(parts) else None


def with_modes(cost: Cost | None, options: Mapping[str, Any]) -> Cost | None:
    """With the Python that torch's modes run for each operator of blocks with a budget."""
    if cost is None or not 0 < options.get(CHECKPOINTED_BUDGET, 0) < 1:
        return cost
    return replace(cost, operators=_OPERATORS_UNDER_MODES * cost.operators)


class Predictions:
    """Costs of a config's step with options, each predicted once.

    Args:
        cfg: A checked config of training.
        left_out: To which is added why options are refused.
        like: Predictions of the same config for another batch, whose samples and results are used.

    Attributes:
        samples: Make the config's batch.
        operators: That are known.
        lists: Lists of so many equal blocks that what a step costs follows from fewer of them.
    """

    def __init__(
        self, cfg: Config, left_out: dict[str, str], like: Predictions | None = None
    ) -> None:
        self._cfg, self._left_out = cfg, left_out
        self._samples = cfg.train_dataloader.batch_size
        self.samples: FewSamples = like.samples if like else FewSamples(cfg)
        self._batches: dict[int, Callable[[], Any]] = like._batches if like else {}  # by size
        self.operators: KnownOperators = like.operators if like else KnownOperators()
        self.lists: Mapping[str, int] = like.lists if like else {}
        # By batch and options.
        self._known: dict[_Key, Cost | None] = like._known if like else {}
        self._copies: Copies = like._copies if like else Copies(self)
        self._begun: dict[_Key, Future[_Predicted]] = {}
        self._only_asks = False

    def look_for_blocks(self, model: nn.Module) -> None:
        """Find the lists of a model that goes without some of their blocks."""
        several = lists_of_blocks(model).items()
        self.lists = {name: count for name, count in several if count >= _DEEP}
        if self.lists and not self._can_be_short():
            self.lists = {}
            self._copies = Copies(self)  # with which there are lists

    def batch_of(self, cfg: Config) -> Callable[[], Any]:
        """What gives the batch of a config in the mode of known operators.

        It is stacked once, as thousands of samples take longer than the step of a small model; but
        each time anew if there is more in it than tensors and plain values.
        """
        size = cfg.train_dataloader.batch_size
        if size not in self._batches:
            anew = functools.partial(self.samples, cfg)
            batch = made_once(anew, self.operators)
            leaves = pytree.tree_leaves(batch)
            is_plain = all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves)
            self._batches[size] = (lambda: batch) if is_plain else anew
        return self._batches[size]

    def knows(self, options: Mapping[str, Any]) -> bool:
        """Whether the cost of the whole step is known."""
        return self._key(options) in self._known

    def asked_first(self, cost_of: Callable[[T], Cost | None], what: T) -> Cost | None:
        """What a function gives that asks for predictions: all of them are begun beside each other.

        It is called twice where there are processes for that, at first for what it asks for.
        """
        if self._copies and not self._only_asks:
            self._only_asks = True
            try:
                cost_of(what)
            except BrokenExecutor:
                self._copies.give_up()
            finally:
                self._only_asks = False
        return cost_of(what)

    def know(self, options: Mapping[str, Any], cost: Cost | None) -> None:
        """Take this for the cost of the whole step."""
        self._known[self._key(options)] = cost

    def followed(self, options: Mapping[str, Any]) -> Cost | None:
        """What a step costs; of a deep model from what models of three and four blocks do."""
        depths = sorted({*self.lists.values()})
        if not depths:
            return self.predicted(options)
        few = dict.fromkeys(depths, FEWEST)
        more = [(depth - FEWEST, {**few, depth: FEWEST + 1}) for depth in depths]
        several = [(1 - sum(weight for weight, _ in more), few), *more]
        if self.predicted(options, few) is None:
            return None
        parts = [(weight, self.predicted(options, blocks)) for weight, blocks in several]
        return sum_of(parts, Cost.by_phase)

    def predicted(
        self, options: Mapping[str, Any], blocks: Mapping[int, int] | None = None
    ) -> Cost | None:
        """What a step with options costs, or one of so many blocks; None if it is refused."""
        short = {f'of {count} blocks': left for count, left in (blocks or {}).items()}
        key = self._key({**options, **short})
        if key in self._known:
            return self._known[key]
        if self._only_asks:
            if key not in self._begun:
                said = dict(self._key(options))  # with the batch, as copies may be of another
                self._begun[key] = self._copies.begin('_predict', said, blocks)
            return _ASKED_FOR
        begun = self._begun.pop(key, None)
        try:
            cost, why = begun.result() if begun else self._predict(options, blocks)
        except BrokenExecutor:  # a process was ended, for its memory say
            self._copies.give_up()
            cost, why = self._predict(options, blocks)
        if why:
            self._left_out[', '.join(options)] = why
        self._known[key] = cost
        return cost

    def _key(self, options: Mapping[str, Any]) -> _Key:
        return tuple(sorted({_BATCH_SIZE: self._samples, **options}.items()))

    def _predict(self, options: Mapping[str, Any], blocks: Mapping[int, int] | None) -> _Predicted:
        cfg = copy.deepcopy(self._cfg)
        merge_options(cfg, options)
        try:
            check_config(cfg)
            batch = self.batch_of(cfg)
            memory = carried_out(
                lambda: step_of(cfg, batch(), blocks)(), self.operators, lines=False
            )
            phases = self._at_places(peaks_by_phase(memory), blocks or {})
            return with_modes(Cost.of(prediction_of(memory), phases), options), ''
        except UnpredictableError:
            raise
        except ValueError as error:
            if options.keys() <= {_BATCH_SIZE}:
                raise
            return None, str(error)

    def _at_places(
        self, phases: Mapping[Phase, int], blocks: Mapping[int, int]
    ) -> dict[Phase, int]:
        """Phases by names that are the same at every depth."""
        lists = {name: blocks.get(count, count) for name, count in self.lists.items()}
        placed: dict[Phase, int] = {}
        for phase, nbytes in phases.items():
            part, module = (place_of(name, lists) for name in (phase.part, phase.module))
            where = phase._replace(part=part, module=module)
            placed[where] = max(placed.get(where, 0), nbytes)
        return placed

    def _can_be_short(self) -> bool:
        """Whether the model goes without some of its blocks, as its forward may name each."""
        try:
            self.asked_first(self.followed, {})
        except (UnpredictableError, AttributeError, LookupError, AssertionError):
            return False
        return True
