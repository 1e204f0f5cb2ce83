"""Mixtures of experts of the real transformers library, tiny and random: adatom's experts, and adatom.nn.MoE."""

import copy
import pickle

import pytest
import torch

import adatom

transformers = pytest.importorskip("transformers", minversion="5.5")

from adatom.integrations.transformers_moe import experts_forward, register, swap_routers  # noqa: E402
from adatom.nn import MoE  # noqa: E402

register()

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def mixtral():
    config = transformers.MixtralConfig(**TEXT, num_local_experts=6, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM, config


def qwen3(norm=True):
    config = transformers.Qwen3MoeConfig(
        **TEXT, head_dim=8, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=norm
    )
    return transformers.Qwen3MoeForCausalLM, config


def deepseek():
    config = transformers.DeepseekV3Config(
        **dict(TEXT, num_key_value_heads=4),
        n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, moe_intermediate_size=24,
        n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=2.5, q_lora_rank=16, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM, config


FAMILIES = {"mixtral": mixtral, "qwen3": qwen3, "qwen3 not renormalized": lambda: qwen3(False), "deepseek": deepseek}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def softmax_in_its_own_dtype(monkeypatch):
    """Routers take the softmax of float64 in float32; here it stays float64, so that results can be compared."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(
        torch.nn.functional,
        "softmax",
        lambda x, dim=-1, dtype=None: softmax(x, dim, dtype=None if x.dtype == torch.float64 else dtype),
    )


def build(name, experts, dtype):
    torch.manual_seed(0)
    cls, config = FAMILIES[name]()
    model = cls._from_config(config, attn_implementation="eager", experts_implementation=experts).to(dtype)
    with torch.no_grad():
        for key, p in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" not in key and "inv_freq" not in key:
                p.copy_(torch.randn_like(p) * 0.3)
    return model.train()


def logits_and_gradients(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits)
    (logits * weights).sum().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_models_are_what_eager_models_are(name, dtype):
    ids = torch.randint(3, 64, (3, 11))
    theirs, ours = build(name, "eager", dtype), build(name, "adatom", dtype)
    assert ours.config._experts_implementation == "adatom"
    want, grads = logits_and_gradients(theirs, ids)
    got, found = logits_and_gradients(ours, ids)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 2e-3}
    torch.testing.assert_close(got, want, **tolerance)
    assert found.keys() == grads.keys() and any("gate_up_proj" in n for n in found)
    for n, g in grads.items():
        torch.testing.assert_close(found[n], g, **tolerance, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_swapped_routers_are_what_the_models_own_are(name, dtype, monkeypatch):
    ids = torch.randint(3, 64, (3, 11))
    theirs, ours = build(name, "eager", dtype), build(name, "eager", dtype)
    layers = 1 if name == "deepseek" else 2
    routers = [m for m in ours.modules() if type(m).__name__.endswith("Router")]
    assert swap_routers(ours) == layers == len(routers) and swap_routers(ours) == 0
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    gates = [m for m in theirs.modules() if type(m).__name__.endswith("Router")]
    x = torch.randn(2, 5, 32, dtype=dtype)
    for mine, own in zip(routers, gates):
        assert isinstance(mine, type(own)) and type(mine) is not type(own)
        for got, want in zip(mine(x), own(x)):
            assert got.dtype == want.dtype and got.shape == want.shape
        (_, weights, indices), (_, expected, places) = mine(x), own(x)
        order, other = indices.sort(1), places.sort(1)  # DeepSeek's are in no order
        assert torch.equal(order.values, other.values)
        torch.testing.assert_close(weights.gather(1, order.indices), expected.gather(1, other.indices))
    if dtype == torch.float32:
        want, grads = logits_and_gradients(theirs, ids)
        got, found = logits_and_gradients(copy.deepcopy(ours), ids)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-3)
        again, _ = logits_and_gradients(pickle.loads(pickle.dumps(ours)), ids)
        assert torch.equal(again, got)
        assert found.keys() == grads.keys()
        for n, g in grads.items():
            torch.testing.assert_close(found[n], g, rtol=1e-3, atol=2e-3, msg=lambda m, n=n: f"{n}: {m}")
    calls = []
    route = adatom.moe_route
    monkeypatch.setattr(
        "adatom.integrations.transformers_moe.moe_route", lambda *a, **k: calls.append(k) or route(*a, **k)
    )
    ours(input_ids=ids)
    assert len(calls) == layers
    if name != "deepseek":
        recorded = ours(input_ids=ids, output_router_logits=True).router_logits
        assert len(recorded) == layers and recorded[0].shape[-1] == 6


def test_routers_of_old_releases_are_refused(monkeypatch):
    monkeypatch.setattr("adatom.integrations.transformers_moe.version", lambda name: "5.5.4")
    with pytest.raises(NotImplementedError, match=r"transformers 5.6 or newer; got transformers=\(5, 5\)"):
        swap_routers(torch.nn.Linear(2, 2))


def test_routers_of_other_libraries_stay():
    class MixtralTopKRouter(torch.nn.Linear):
        pass

    assert swap_routers(torch.nn.Sequential(MixtralTopKRouter(4, 2))) == 0
    model = build("deepseek", "eager", torch.float32)
    for module in model.modules():
        if type(module).__name__ == "DeepseekV3TopkRouter":
            del module.num_group  # as where the block, not the router, knows of groups
    assert swap_routers(model) == 0


def test_activations_that_are_functions_serve(monkeypatch):
    """LFM2's experts hold torch.nn.functional.silu, no module."""
    seen = []
    monkeypatch.setattr("adatom.integrations.transformers_moe.moe_routed", lambda x, *a, **k: seen.append(k) or x)
    experts = build("mixtral", "adatom", torch.float32).model.layers[0].mlp.experts
    del experts.act_fn
    experts.act_fn = torch.nn.functional.silu
    routed = torch.zeros(2, 2, dtype=torch.long), torch.ones(2, 2)
    assert experts_forward(experts, torch.randn(2, 32), *routed).shape == (2, 32)
    assert seen == [{"activation": "silu"}]
    experts.act_fn = torch.nn.functional.mish
    with pytest.raises(NotImplementedError, match="an activation among"):
        experts_forward(experts, torch.randn(2, 32), *routed)


@pytest.mark.parametrize("name", FAMILIES)
def test_adatoms_experts_run(name, monkeypatch):
    """What is compared above is not the eager model with itself."""
    calls = []
    monkeypatch.setattr("adatom.integrations.transformers_moe.moe_routed", lambda x, *a, **k: calls.append(k) or x)
    build(name, "adatom", torch.float32)(input_ids=torch.randint(3, 64, (2, 5)))
    assert len(calls) == (1 if name == "deepseek" else 2) and calls[0] == {"activation": "silu"}


def module_like(name, block, config):
    """An adatom.nn.MoE with the weights of a block."""
    options = {"renormalize": True}
    if name.startswith("qwen3"):
        options["renormalize"] = config.norm_topk_prob
    if name == "deepseek":
        options = {
            "scoring": "sigmoid", "groups": (config.n_group, config.topk_group), "selection_bias": True,
            "scale": config.routed_scaling_factor, "shared": config.moe_intermediate_size * config.n_shared_experts,
        }  # fmt: skip
    experts, wide, dim = block.experts.gate_up_proj.shape
    m = MoE(dim, wide // 2, experts, config.num_experts_per_tok, dtype=torch.float64, **options)
    with torch.no_grad():
        m.router.copy_(block.gate.weight)
        m.gate_up.copy_(block.experts.gate_up_proj)
        m.down.copy_(block.experts.down_proj)
        if name == "deepseek":
            m.selection_bias.copy_(block.gate.e_score_correction_bias)
            shared = block.shared_experts
            m.shared_gate_up.copy_(torch.cat((shared.gate_proj.weight, shared.up_proj.weight)))
            m.shared_down.copy_(shared.down_proj.weight)
    return m


@pytest.mark.parametrize("name", FAMILIES)
def test_the_module_is_a_models_block(name):
    """Routing too: adatom's own. Mixtral's and DeepSeek's routers compute in float32."""
    model = build(name, "eager", torch.float64)
    block = model.model.layers[-1].mlp
    m = module_like(name, block, model.config)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    results = [f(i) for f, i in zip((m, block), inputs)]
    tolerance = {"rtol": 1e-7, "atol": 1e-9} if name.startswith("qwen3") else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(*results, **tolerance)
    for out in results:
        (out * torch.arange(32)).sum().backward()
    pairs = [
        (inputs[0], inputs[1]),
        (m.router, block.gate.weight),
        (m.gate_up, block.experts.gate_up_proj),
        (m.down, block.experts.down_proj),
    ]
    if name == "deepseek":
        pairs.append((m.shared_down, block.shared_experts.down_proj.weight))
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=10 * tolerance["rtol"], atol=10 * tolerance["atol"])


def experts_of(name, **changed):
    cls, config = FAMILIES[name]()
    module = cls._from_config(config).model.layers[-1].mlp.experts.double()
    for key, value in changed.items():
        setattr(module, key, value)
    return module


def routed(tokens=5, experts=6):
    x = torch.randn(tokens, 32, dtype=torch.float64)
    return x, torch.randint(experts, (tokens, 2)), torch.rand(tokens, 2, dtype=torch.float64)


def test_experts_of_another_rank():
    """Their index is the number of experts here: they add nothing."""
    module, (x, indices, weights) = experts_of("mixtral"), routed()
    module._is_expert_parallel = True
    indices[:, 1] = module.num_experts
    with torch.no_grad():
        got = experts_forward(module, x, indices, weights)
        torch.testing.assert_close(got, experts_forward(module, x, indices[:, :1], weights[:, :1]))


def test_transposed_experts():
    module, given = experts_of("mixtral"), routed()
    want = experts_forward(module, *given)
    for name in ("gate_up_proj", "down_proj"):
        setattr(module, name, torch.nn.Parameter(getattr(module, name).detach().mT.contiguous()))
    module.is_transposed = True
    torch.testing.assert_close(experts_forward(module, *given), want)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"has_gate": False}, "a gate"),
        ({"has_bias": True}, "no biases"),
        ({"has_post_expert_norm": True}, "no norm"),
        ({"is_concatenated": False}, "the gate's rows before"),
        ({"act_fn": torch.nn.Tanh()}, "an activation among"),
    ],
)
def test_other_experts_are_refused(changed, message):
    with pytest.raises(NotImplementedError, match=message):
        experts_forward(experts_of("mixtral", **changed), *routed())


def test_a_gate_of_its_own_is_refused():
    config = transformers.GptOssConfig(**TEXT, num_local_experts=2, num_experts_per_tok=2, head_dim=8)
    module = transformers.GptOssForCausalLM._from_config(config).model.layers[0].mlp.experts.double()
    module.has_bias, module.is_concatenated = False, True
    with pytest.raises(NotImplementedError, match="the usual gate"):
        experts_forward(module, *routed(experts=2))
