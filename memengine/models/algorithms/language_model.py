"""Causal language models of the transformers library, which is an optional package.

Shapes: B texts, L tokens each, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from memengine.models.algorithms.by_sample import LossBySample
from memengine.models.backbones.text_libraries import transformers_model
from memengine.registry import MODELS


@MODELS.register_module()
class CausalLanguageModel(LossBySample):
    """Predicts each token of a text from those before it: GPT-2 and whatever has its interface.

    A batch holds tokens ``inputs`` Long[B, L], all of one length and without padding; see
    ``TextBlocks``.

    Args:
        model_name: A folder or a name on the hub, e.g. ``'gpt2'``. With ``pretrained=False`` and
            ``config`` only the kind of model: ``'gpt2'``.
        pretrained: Load the weights (a name needs the network or the library's cache).
        config: Entries of the model's configuration, e.g. ``dict(n_layer=2)``.
        **kwargs: Of :class:`Algorithm`.

    Raises:
        ImportError: When transformers is missing.
        ValueError: For a model that it does not know; in a step, for tokens of another shape.

    The loss is the mean of the cross-entropy over all predicted tokens, in nats.
    """

    def __init__(
        self,
        model_name: str,
        pretrained: bool = True,
        config: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.model: Any = transformers_model(
            'AutoModelForCausalLM', model_name, pretrained, config, 'CausalLanguageModel'
        )

    def targets(self, inputs: Any, data_samples: Any = None, size: Any = None) -> None:
        """None; the batch is checked here, once."""
        if not isinstance(inputs, Tensor) or inputs.dim() != 2 or inputs.is_floating_point():
            what = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
            raise ValueError(f'CausalLanguageModel: expected tokens Long[B, L], got {what}')
        entries = self.model.get_input_embeddings().num_embeddings
        if int(inputs.max()) >= entries:
            raise ValueError(
                f'CausalLanguageModel: token {int(inputs.max())} is not among the {entries} of the '
                "model; give the dataset the model's own tokenizer"
            )

    def embed(self, inputs: Tensor, data_samples: Any = None) -> dict[str, Tensor]:
        """The mean cross-entropy of each text, [b]."""
        logits = self.model(input_ids=inputs, use_cache=False).logits[:, :-1]  # [b, L - 1, V]
        losses = F.cross_entropy(logits.transpose(1, 2), inputs[:, 1:], reduction='none')
        return {'loss': losses.mean(dim=1)}

    def predict(self, inputs: Tensor, data_samples: Any = None) -> list[dict[str, Any]]:
        """``loss``, the mean cross-entropy, and the number of ``predicted_tokens`` of each text."""
        losses = self.embed(inputs)['loss']
        return [{'loss': loss, 'predicted_tokens': inputs.shape[1] - 1} for loss in losses]
