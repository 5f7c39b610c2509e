"""Perplexity of a language model."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from mmengine.evaluator import BaseMetric

from memengine.registry import METRICS

_LARGEST = math.log(sys.float_info.max)


@METRICS.register_module()
class PerplexityMetric(BaseMetric):
    """``perplexity``: the exponential of the mean cross-entropy over all predicted tokens.

    For each text the model returns ``loss``, its mean cross-entropy in nats, and
    ``predicted_tokens``, as ``CausalLanguageModel`` does. Guessing among V tokens has perplexity V.

    Args:
        prefix: Put before the name, for several such metrics.

    Raises:
        ValueError: For a model that returns something else.

    Cost: two numbers per text, gathered from all ranks.
    """

    default_prefix = ''

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Keep the losses of a batch."""
        if any('predicted_tokens' not in sample for sample in data_samples):
            raise ValueError(
                "PerplexityMetric: the model returns no 'predicted_tokens'; it needs a "
                'CausalLanguageModel'
            )
        self.results += [
            (float(sample['loss']), sample['predicted_tokens']) for sample in data_samples
        ]

    def compute_metrics(self, results: list[tuple[float, int]]) -> dict[str, float]:
        """The perplexity of all texts."""
        total = sum(loss * tokens for loss, tokens in results)
        mean = total / sum(tokens for _, tokens in results)
        return {'perplexity': math.exp(mean) if not mean > _LARGEST else math.inf}
