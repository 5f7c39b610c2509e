"""A module's forward by the rules that hold for what is saved in it."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memengine._torch_private.autograd import is_checkpointing, is_under_functorch
from memengine._torch_private.modules import BatchOrInstanceNorm
from memengine._torch_private.ops import do_not_compile
from memengine.techniques.compression.hooks.forward_hooks import ForwardHooks
from memengine.techniques.compression.replay import ForwardPlans
from memengine.techniques.compression.rules import Rule
from memengine.techniques.modules.saved_tensors import KeptAsIs, is_in_backward, is_plain
from memengine.techniques.modules.wrapped_forward import WrappedForward

_NORMS = (BatchOrInstanceNorm, nn.GroupNorm)


class _State(threading.local):
    """Of a thread."""

    hooks: ForwardHooks | None = None  # of the forward that runs


_state = _State()


class CompressedForward(WrappedForward):
    """A module's forward that knows which rules hold for what is saved in it."""

    setting = 'compressed activations'

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.rules: list[tuple[Rule, str]] = []  # with what its model calls this module
        self.model_rules: list[Rule] = []  # that hold here or elsewhere in their model
        self._is_norm = isinstance(module, _NORMS)
        self._plans = ForwardPlans()  # of forward passes of which this is the outermost module

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), '_plans': ForwardPlans()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; what it saves is kept by the rules."""
        hooks = _state.hooks
        if hooks is None:
            return self._run_outermost(args, kwargs)
        if self.model_rules != hooks.rules:  # some hold for a part of the model only
            if any(rule.is_paused for rule in self.model_rules):
                return self._run_as_it_is(args, kwargs)
            hooks.begin_rules(self.model_rules)
        outside, hooks.forward = hooks.forward, self
        try:
            outputs = self.plain(*args, **kwargs)
        finally:
            hooks.forward = outside
        # Only beside a second rule is anything computed again from codes.
        if self._is_norm and len(self.model_rules) > 1 and is_plain(outputs):
            hooks.graph.note_result_of_norm(outputs)
        hooks.examine_operations(outputs, (args, kwargs))
        return outputs

    def _run_as_it_is(self, args: Any, kwargs: Any) -> Any:
        """Run the module without rules, within a model whose others go on."""
        hooks, _state.hooks = _state.hooks, None
        try:
            with saved_tensors_hooks(KeptAsIs, KeptAsIs.tensor):
                return self.plain(*args, **kwargs)
        finally:
            _state.hooks = hooks

    @do_not_compile
    def _run_outermost(self, args: Any, kwargs: Any) -> Any:
        off = not torch.is_grad_enabled() or not self.module.training
        # Of which the former has no graph, and the latter exports the model as it is.
        off |= is_under_functorch() or torch.compiler.is_compiling()
        off |= any(rule.is_paused for rule in self.model_rules)
        if off or is_in_backward() or is_checkpointing():  # of which the middle one recomputes
            return self.plain(*args, **kwargs)
        for rule in self.model_rules:
            rule.begin_forward()  # which may raise
        replay = self._plans.begin((*args, *kwargs.values()), self.model_rules)
        hooks = _state.hooks = ForwardHooks(self.module, self.model_rules, replay)
        try:
            with hooks:
                outputs = self(*args, **kwargs)
                hooks.finish()
                return outputs
        finally:
            _state.hooks = None
            hooks.let_go()
