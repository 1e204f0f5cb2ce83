"""Models of the real transformers library, tiny and random: adatom against their own eager attention."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.5")

from adatom.integrations.transformers import attention_forward, attention_mask, register  # noqa: E402

register()

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = dict(TEXT, num_key_value_heads=2, head_dim=8)


def llama():
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**GQA)


def mistral():
    return transformers.MistralForCausalLM, transformers.MistralConfig(**GQA, sliding_window=4)


def gemma():
    """Softcap, and a sliding window in every other layer."""
    return transformers.Gemma2ForCausalLM, transformers.Gemma2Config(
        **GQA, attn_logit_softcapping=2.0, query_pre_attn_scalar=8, sliding_window=4
    )


def gpt_oss():
    """Sinks, and a sliding window in every other layer."""
    return transformers.GptOssForCausalLM, transformers.GptOssConfig(
        **GQA,
        sliding_window=4,
        num_local_experts=2,
        num_experts_per_tok=2,  # all: no choice that rounding could turn over
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def bert():
    return transformers.BertForMaskedLM, transformers.BertConfig(
        **TEXT, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0
    )


def t5():
    """A learned position bias, causal self-attention in the decoder, cross-attention."""
    return transformers.T5ForConditionalGeneration, transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
    )


FAMILIES = (llama, mistral, gemma, gpt_oss, bert, t5)
CAUSAL = (llama, mistral, gemma, gpt_oss)


def build(family, dtype=torch.float64, attn="eager"):
    torch.manual_seed(0)
    cls, config = family()
    config._experts_implementation = "eager"  # the grouped product has no float64
    model = cls._from_config(config, attn_implementation=attn).to(dtype)
    with torch.no_grad():  # large enough that attention is far from uniform, and that sinks and biases matter
        for name, p in model.named_parameters():
            if "norm" not in name.lower():
                p.copy_(torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.5))
    return model.train()


def tokens(padding, batch=3, length=11):
    """ids (batch, length) and the mask (batch, length) of the tokens that exist; None without padding."""
    ids = torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(1))
    if padding == "none":
        return ids, None
    mask = torch.ones_like(ids)
    for b in range(1, batch):
        pad = slice(0, 2 * b) if padding == "left" else slice(length - 2 * b, length)
        mask[b, pad] = 0
    return ids * mask, mask


def logits_and_gradients(model, ids, mask):
    """The logits of the tokens that exist, and the gradients of all parameters of a sum over them."""
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids.flip(0)[:, :7] * (ids[:, :7] > 0)
    else:
        inputs["use_cache"] = False if model.config.model_type != "bert" else None
    logits = model(**inputs).logits
    if mask is not None:
        logits = logits[mask[:, : logits.shape[1]].bool()]
    model.zero_grad()
    weights = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (logits * weights.to(logits)).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def softmax_in_its_own_dtype(monkeypatch):
    """Eager families take the softmax of float64 in float32, where their masks overflow to -inf and padding to NaN."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(
        torch.nn.functional,
        "softmax",
        lambda x, dim=-1, dtype=None: softmax(x, dim, dtype=None if x.dtype == torch.float64 else dtype),
    )


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_logits_and_gradients_as_eager(family, padding, dtype):
    ids, mask = tokens(padding)
    eager, model = build(family, dtype), build(family, dtype, "adatom")
    assert model.config._attn_implementation == "adatom"
    expected, expected_grads = logits_and_gradients(eager, ids, mask)
    logits, grads = logits_and_gradients(model, ids, mask)
    # Norms and rotations are float32 in these models whatever their dtype, and round differently now and then.
    tolerance = 1e-6 if dtype == torch.float64 else 2e-4
    assert grads.keys() == expected_grads.keys()
    # Some gradients are 0 but for rounding: a key's bias adds the same to all scores of a query.
    floor = 1e-2 * max(g.abs().max() for g in expected_grads.values())
    for name, got, want in [("logits", logits, expected), *((n, grads[n], expected_grads[n]) for n in grads)]:
        assert torch.isfinite(got).all(), name
        error = (got - want).abs().max() / want.abs().max().clamp_min(floor if name in grads else 0)
        assert error < tolerance, f"{name}: {error:.1e}"


def errors_in_bf16(family, device):
    """Largest errors of logits and gradients in bfloat16, relative to float64: adatom's, and PyTorch's."""
    ids, mask = (None if x is None else x.to(device) for x in tokens("right"))
    exact = build(family).to(device, torch.bfloat16).to(torch.float64)
    expected, expected_grads = logits_and_gradients(exact, ids, mask)
    scale = max(g.abs().max() for g in expected_grads.values())
    rival = "sdpa" if type(exact)._supports_sdpa else "eager"
    errors = []
    for attn in ("adatom", rival):
        logits, grads = logits_and_gradients(build(family, attn=attn).to(device, torch.bfloat16), ids, mask)
        worst = max((grads[n].double() - g).abs().max() for n, g in expected_grads.items())
        errors.append(
            (((logits.double() - expected).abs().max() / expected.abs().max()).item(), (worst / scale).item())
        )
    return errors


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_bf16_errs_no_more_than_twice_pytorch(family, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    ours, theirs = errors_in_bf16(family, device)
    floor = 2**-8  # one rounding of bfloat16
    assert ours[0] <= 2 * theirs[0] + floor and ours[1] <= 2 * theirs[1] + floor, (ours, theirs)


def test_position_bias_learns():
    ids, mask = tokens("right")
    _, grads = logits_and_gradients(build(t5, attn="adatom"), ids, mask)
    tables = [n for n in grads if "relative_attention_bias" in n]
    assert len(tables) == 2 and all(grads[n].abs().max() > 1e-3 for n in tables)


def test_sinks_learn():
    ids, mask = tokens("left")
    _, grads = logits_and_gradients(build(gpt_oss, attn="adatom"), ids, mask)
    assert all(g.abs().max() > 1e-6 for n, g in grads.items() if "sinks" in n)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("family", CAUSAL, ids=lambda f: f.__name__)
def test_generation_with_a_cache(family, padding, cache):
    """Long enough for the sliding windows to be full."""
    ids, mask = tokens(padding, batch=2, length=7)
    generated = []
    for attn in ("eager", "adatom"):
        model = build(family, attn=attn).eval()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids) if mask is None else mask,
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
            cache_implementation=None if cache == "dynamic" else "static",
            disable_compile=True,
        )
        generated.append(out)
    assert generated[0].shape == (2, 15)
    assert torch.equal(*generated)


def test_t5_generation():
    ids, mask = tokens("right", batch=2)
    generated = [
        build(t5, attn=attn).eval().generate(ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6)
        for attn in ("eager", "adatom")
    ]
    assert torch.equal(*generated)


@pytest.mark.parametrize("family", CAUSAL, ids=lambda f: f.__name__)
def test_prefill_in_chunks(family):
    """Several queries at a time behind a cache: the causal mask starts in the middle."""
    ids, _ = tokens("none")
    outputs = []
    for attn, chunks in (("eager", (11,)), ("adatom", (5, 3, 1, 2))):
        model, cache, parts = build(family, attn=attn).eval(), transformers.DynamicCache(config=family()[1]), []
        for part in ids.split(chunks, 1):
            parts.append(model(part, past_key_values=cache, use_cache=True).logits)
        outputs.append(torch.cat(parts, 1))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_packed_sequences():
    """Positions that start again separate sequences in one row."""
    ids, _ = tokens("none", batch=1, length=9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    outputs = [
        build(gemma, attn=attn)(ids, position_ids=positions, use_cache=False).logits for attn in ("eager", "adatom")
    ]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_mask_of_the_users_own():
    """A 4-D mask is taken as it is, float or bool."""
    ids, _ = tokens("none")
    keep = torch.rand(3, 1, 11, 11, generator=torch.Generator().manual_seed(3)) < 0.7
    keep |= torch.eye(11, dtype=torch.bool)
    added = torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, torch.finfo(torch.float64).min)
    eager = build(llama)(ids, attention_mask=added, use_cache=False).logits
    for mask in (added, keep):
        out = build(llama, attn="adatom")(ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(out, eager, rtol=1e-5, atol=1e-5)


def test_no_square_mask_is_built():
    """Padding is a mask of keys; causality and the window are options of the kernel."""
    seen = []

    def spy(module, query, key, value, mask, **kwargs):
        seen.append(None if mask is None else tuple(mask.shape))
        return attention_forward(module, query, key, value, mask, **kwargs)

    transformers.AttentionInterface.register("adatom", spy)
    try:
        for family, padding in ((llama, "none"), (llama, "left"), (gemma, "none"), (gemma, "right"), (bert, "right")):
            ids, mask = tokens(padding)
            build(family, attn="adatom")(ids, attention_mask=mask)
    finally:
        register()
    pad, nothing = (3, 1, 1, 11), (1, 1, 1, 1)
    assert seen == [None, None, pad, pad, nothing, None, pad, pad, pad, pad]


def test_switching_implementations():
    ids, mask = tokens("left")
    model = build(llama).eval()
    eager = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("adatom")
    torch.testing.assert_close(
        model(ids, attention_mask=mask).logits[mask.bool()], eager[mask.bool()], rtol=1e-5, atol=1e-5
    )


def test_gradient_checkpointing():
    ids, mask = tokens("left")
    model = build(gemma, attn="adatom")
    expected = logits_and_gradients(model, ids, mask)[1]
    checkpoint = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    checkpoint({"use_reentrant": False})
    for name, grad in logits_and_gradients(model, ids, mask)[1].items():
        torch.testing.assert_close(grad, expected[name])


def test_who_asks_for_attention_weights_is_warned(monkeypatch):
    from adatom.integrations import transformers as integration

    said = []
    monkeypatch.setattr(integration._log, "warning_once", said.append)
    model = build(llama, attn="adatom")
    ids, mask = tokens("none")
    model(ids, attention_mask=mask)
    assert not said
    model(ids, attention_mask=mask, output_attentions=True)
    assert said and all("no attention weights" in text for text in said)


def test_refusals():
    config = llama()[1]
    config.attention_dropout = 0.1
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="adatom")
    ids, _ = tokens("none")
    with pytest.raises(NotImplementedError, match="no attention dropout.*dropout=0.1"):
        model.train()(ids)
    model.eval()(ids)
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="no cache"):
        attention_forward(torch.nn.Module(), q, q, q, None, cache=object())
    with pytest.raises(ValueError, match=r"sliding window size"):
        attention_forward(torch.nn.Module(), q, q, q, torch.ones(1, 1, 1, 3, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"unchanged; got attention_mask=uint8\[1, 1, 3, 3\]"):
        attention_forward(torch.nn.Module(), q, q, q, torch.ones(1, 1, 3, 3, dtype=torch.uint8))


def test_model_that_does_not_route_is_refused():
    """Its own attention would add our masks to its scores."""
    with pytest.raises(ValueError, match="GPTJForCausalLM .* attention of its own"):
        transformers.GPTJForCausalLM._from_config(
            transformers.GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=4),
            attn_implementation="adatom",
        )


@pytest.mark.parametrize("name", ["Splinter", "BigBirdPegasus"])
def test_model_that_supports_eager_attention_alone_is_refused(name):
    """Splinter's layers would be causal, those of BigBirdPegasus' decoder would not, for want of an `is_causal`."""
    with pytest.raises(ValueError, match=f"{name}Model .* supports eager attention alone"):
        config = getattr(transformers, f"{name}Config")(vocab_size=64, num_hidden_layers=1, encoder_layers=1)
        getattr(transformers, f"{name}Model")._from_config(config, attn_implementation="adatom")


def test_registering_twice_wraps_once():
    before = transformers.PreTrainedModel.get_correct_attn_implementation
    register()
    assert transformers.PreTrainedModel.get_correct_attn_implementation is before


def test_chunked_attention_gets_a_full_mask():
    """Chunks look like a window to the mask function, but are not one."""
    config = transformers.LlamaConfig(**GQA)
    config.attention_chunk_size = 4
    chunked = transformers.masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    mask = attention_mask(1, 8, 8, mask_function=chunked, local_size=4, config=config)
    i, j = torch.arange(8)[:, None], torch.arange(8)
    assert mask.dtype == torch.bool and torch.equal(mask[0, 0], (j <= i) & (i // 4 == j // 4))
