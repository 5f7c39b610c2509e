"""A language model of transformers: its loss by hand, the same step in slices."""

import sys

import pytest
import torch
from torch.nn import functional as F

from memengine.engine.optim import AccumulationOptimWrapper, OptimWrapper
from memengine.models import CausalLanguageModel
from memengine.testing import assert_same_step

SMALL = dict(vocab_size=19, n_positions=8, n_embd=12, n_layer=2, n_head=2)
SMALL.update(bos_token_id=0, eos_token_id=0)
TOKENS = torch.randint(0, 19, (5, 8), generator=torch.Generator().manual_seed(0))


def build(**changes):
    torch.manual_seed(0)
    config = {**SMALL, 'resid_pdrop': 0.0, 'embd_pdrop': 0.0, 'attn_pdrop': 0.0, **changes}
    return CausalLanguageModel('gpt2', pretrained=False, config=config).double()


def test_the_loss_is_the_mean_over_predicted_tokens():
    model = build()
    logits = model.model(input_ids=TOKENS).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    loss = model(TOKENS, mode='loss')['loss']
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    theirs = model.model(input_ids=TOKENS, labels=TOKENS).loss  # transformers' own
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-6)


@pytest.mark.parametrize('size', [1, 2])
def test_a_step_in_slices_is_the_plain_step(size):
    def gradients(wrapper, **settings):
        model = build().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.zero_grad = lambda: None  # so that the gradients are left to be looked at
        log = model.train_step(dict(inputs=TOKENS), wrapper(optimizer, **settings))
        return {**log, **{name: p.grad for name, p in model.named_parameters()}}

    sliced = gradients(AccumulationOptimWrapper, micro_batch_size=size)
    assert_same_step(sliced, gradients(OptimWrapper))


def test_a_saved_model_is_loaded_by_its_folder(tmp_path):
    model = build()
    model.model.save_pretrained(tmp_path)
    again = CausalLanguageModel(str(tmp_path)).double()
    expected, given = model.state_dict(), again.state_dict()
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[name], expected[name]) for name in expected)


@pytest.mark.parametrize('saved', [torch.bfloat16, torch.float16])
def test_weights_that_are_saved_in_half_precision_are_trained_in_fp32(tmp_path, saved):
    """transformers 5 takes the file's precision, in which an update of 1e-4 of a weight is none."""
    build().model.to(saved).save_pretrained(tmp_path)
    assert {p.dtype for p in CausalLanguageModel(str(tmp_path)).parameters()} == {torch.float32}
    chosen = CausalLanguageModel(str(tmp_path), config=dict(torch_dtype=saved))
    assert {p.dtype for p in chosen.parameters()} == {saved}


def test_predictions_are_losses_and_their_numbers_of_tokens():
    model = build().eval()
    found = model(TOKENS, mode='predict')
    assert [one['predicted_tokens'] for one in found] == [7] * 5
    mean = torch.stack([one['loss'] for one in found]).mean()
    assert mean.item() == pytest.approx(model(TOKENS, mode='loss')['loss'].item())


def test_what_does_not_fit_is_refused(tmp_path):
    model = build()
    with pytest.raises(ValueError, match=r'expected tokens Long\[B, L\], got \(2, 3, 4\)'):
        model(torch.zeros(2, 3, 4).long(), mode='loss')
    with pytest.raises(ValueError, match='token 19 is not among the 19'):
        model(TOKENS.clone().fill_(19), mode='loss')
    with pytest.raises(ValueError, match='gtp2'):
        CausalLanguageModel('gtp2', pretrained=False)
    with pytest.raises(ValueError, match='nowhere'):
        CausalLanguageModel(str(tmp_path / 'nowhere'))


def test_a_missing_library_names_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, 'transformers', None)
    with pytest.raises(ImportError, match='pip install transformers'):
        CausalLanguageModel('gpt2')
