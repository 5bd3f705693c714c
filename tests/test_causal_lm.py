"""CausalLMScorer: packed, shared or alone, the same log-probabilities and gradients, for several architectures."""

import logging

import pytest
import torch
from policy_examples import tiny_llama
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from async_rl import causal_lm
from async_rl.causal_lm import CausalLMScorer, disable_dropout, load_causal_lm, unique_weights
from async_rl.packing import ScoredSequence

SIZES = dict(
    vocab_size=31,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.3,
    pad_token_id=0,
)


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=31, n_embd=32, n_layer=2, n_head=4, n_positions=48, initializer_range=0.3)
    )


def gemma2():
    config = Gemma2Config(**SIZES, final_logit_softcapping=3.0, attn_logit_softcapping=2.0, sliding_window=4)
    return Gemma2ForCausalLM(config)


ARCHITECTURES = {
    "llama-tied": tiny_llama,
    "llama-untied": lambda: tiny_llama(tie_word_embeddings=False),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "granite-scaled-logits": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
    "gpt2-absolute-positions": gpt2,
    "gemma2-softcapped-sliding": gemma2,
    "mamba-recurrent": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=31, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0)
    ),
}
SHARING = ["llama-tied", "llama-untied", "qwen3", "granite-scaled-logits", "gpt2-absolute-positions"]


def build(architecture):
    torch.manual_seed(0)
    model = ARCHITECTURES[architecture]()
    disable_dropout(model)
    return model.float().train()


def examples():
    """Two groups of samples, a template before both, tool results (unscored) inside one."""
    groups = {(1, 2, 3, 4, 5): [[6, 7, 8], [6, 7, 9, 10, 11, 12], [13]], (1, 2, 3, 14): [[15, 16, 17, 18], [15, 19]]}
    sequences, first = [], 0
    for prompt, completions in groups.items():
        for completion in completions:
            ids = [*prompt, *completion]
            positions = [p for p in range(len(prompt), len(ids)) if ids[p] not in (9, 10)]
            sequences.append(ScoredSequence(ids, positions, first))
            first += len(positions)
    return sequences


def scored(scorer, sequences, temperature=1.0):
    parts = [(batch.tokens, *scorer.score(batch, temperature)) for batch in scorer.pack(sequences)]
    order = torch.cat([tokens for tokens, _, _ in parts]).argsort()
    return torch.cat([logprobs for _, logprobs, _ in parts])[order], torch.cat([e for _, _, e in parts])[order]


def alone(model, sequences, temperature=1.0):
    """Each sequence by itself, straight from the model."""
    values = []
    for s in sequences:
        logits = model(input_ids=torch.tensor([s.token_ids]), use_cache=False).logits[0] / temperature
        logprobs = logits.float().log_softmax(-1)
        values += [logprobs[p - 1, s.token_ids[p]] for p in s.positions]
    return torch.stack(values)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_equals_alone(architecture, attention):
    model = build(architecture)
    if architecture != "mamba-recurrent":  # has no attention to choose
        model.set_attn_implementation(attention)
    scorer = CausalLMScorer(model, "auto", micro_batch_tokens=1000)
    assert scorer.packing.share_prefixes == (architecture in SHARING)
    with torch.no_grad():
        torch.testing.assert_close(scored(scorer, examples())[0], alone(model, examples()), atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("micro_batch_tokens", [8, 1000])
def test_gradients_equal_those_of_the_sequences_alone(architecture, micro_batch_tokens):
    model = build(architecture)
    scorer = CausalLMScorer(model, "auto", micro_batch_tokens)
    weights = torch.linspace(-1, 2, sum(len(s.positions) for s in examples()))
    (alone(model, examples()) * weights).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for batch in scorer.pack(examples()):
        (scorer.score(batch, 1.0)[0] * weights[batch.tokens]).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], atol=2e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_left_padded_equals_packed():
    model = build("llama-tied")
    sequences = examples()
    width = max(len(s.token_ids) for s in sequences)
    ids = torch.tensor([[0] * (width - len(s.token_ids)) + s.token_ids for s in sequences])
    mask = torch.tensor([[0] * (width - len(s.token_ids)) + [1] * len(s.token_ids) for s in sequences])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.log_softmax(-1)
        left_padded = [
            logits[i, p - 1 + width - len(s.token_ids), s.token_ids[p]]
            for i, s in enumerate(sequences)
            for p in s.positions
        ]
        packed, _ = scored(CausalLMScorer(model, True, 1000), sequences)
    torch.testing.assert_close(packed, torch.stack(left_padded), atol=1e-4, rtol=0)


def test_sharing_is_used_and_cheaper():
    model = build("llama-tied")
    tokens = [
        sum(b.input_ids.numel() for b in CausalLMScorer(model, share, 1000).pack(examples())) for share in (True, False)
    ]
    assert tokens == [14, 50]


def test_temperature_divides_the_logits():
    model = build("llama-tied")
    scorer = CausalLMScorer(model, "auto", 1000)
    with torch.no_grad():
        hot, hot_entropy = scored(scorer, examples(), temperature=1.5)
        _, entropy = scored(scorer, examples())
        torch.testing.assert_close(hot, alone(model, examples(), temperature=1.5), atol=1e-4, rtol=0)
    assert (hot_entropy > entropy).all()


def test_logits_are_taken_only_where_a_token_is_predicted():
    model = build("llama-tied")
    scorer = CausalLMScorer(model, "auto", 1000)
    sizes = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: sizes.append(out.shape[:-1].numel()))
    (batch,) = scorer.pack(examples())
    scorer.score(batch, 1.0)
    assert sizes == [len(batch.predictors)]
    assert len(batch.predictors) < batch.input_ids.numel()


def test_a_head_that_is_no_module_of_its_own(monkeypatch):
    model = build("llama-tied")
    expected = alone(model, examples())
    scorer = CausalLMScorer(model, "auto", 1000)
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    torch.testing.assert_close(scored(scorer, examples())[0], expected, atol=1e-4, rtol=0)


def test_sharing_where_it_is_impossible_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="share_prefix=True: Gemma2ForCausalLM has sliding_attention layers"):
        CausalLMScorer(build("gemma2-softcapped-sliding"), True, 1000)
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        CausalLMScorer(build("mamba-recurrent"), True, 1000)


class DeafLlama(LlamaForCausalLM):
    """Looks like a Llama and ignores the mask it is given, as custom code may."""

    def forward(self, input_ids=None, position_ids=None, attention_mask=None, **kwargs):
        return super().forward(input_ids=input_ids, position_ids=None, **kwargs)


def test_a_model_that_ignores_the_mask_is_found_out(caplog):
    torch.manual_seed(0)
    model = DeafLlama(tiny_llama().config).float()
    with caplog.at_level(logging.INFO, logger=causal_lm.__name__):
        scorer = CausalLMScorer(model, "auto", 1000)
    assert not scorer.packing.share_prefixes
    assert "when a prefix is shared" in caplog.text
    torch.testing.assert_close(scored(scorer, examples())[0], alone(model, examples()), atol=1e-4, rtol=0)


def test_soft_capped_attention_keeps_its_cap():
    model = build("gemma2-softcapped-sliding")
    CausalLMScorer(model, "auto", 1000)
    assert model.config._attn_implementation == "eager", "sdpa would leave it out"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bf16_autocast_stays_close(attention):
    model = tiny_llama(initializer_range=0.05)
    model.set_attn_implementation(attention)
    scorer = CausalLMScorer(model, True, 1000)
    with torch.no_grad():
        expected = alone(model, examples())
        with torch.autocast("cpu", torch.bfloat16):
            got, _ = scored(scorer, examples())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=0.05, rtol=0)
    assert not torch.equal(got, expected), "autocast must be on"


def test_gradient_checkpointing_changes_nothing():
    plain, saving = build("llama-tied"), build("llama-tied")
    saving.gradient_checkpointing_enable({"use_reentrant": False})
    for model in (plain, saving):
        scored(CausalLMScorer(model, True, 1000), examples())[0].sum().backward()
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_dropout_is_off_everywhere():
    model = tiny_llama(attention_dropout=0.5).train()
    other = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_embd=32, n_layer=1, n_head=4)).train()
    for m in (model, other):
        disable_dropout(m)
        ids = torch.tensor([[1, 2, 3, 4]])
        assert torch.equal(m(input_ids=ids).logits, m(input_ids=ids).logits)


def test_unique_weights_names_tied_ones_once():
    tied, untied = dict(unique_weights(tiny_llama())), dict(unique_weights(tiny_llama(tie_word_embeddings=False)))
    assert set(untied) - set(tied) == {"lm_head.weight"}
    assert "model.embed_tokens.weight" in tied
    assert not any(t.requires_grad for t in tied.values())


def test_loading_gives_float32_and_names_a_directory_that_is_none(tmp_path, tiny_model_dir):
    assert {p.dtype for p in load_causal_lm(tiny_model_dir).parameters()} == {torch.float32}
    with pytest.raises(FileNotFoundError, match="has no config"):
        load_causal_lm(tmp_path)
