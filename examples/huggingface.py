"""A Hugging Face model with adatom's attention: a tiny random Llama generates, and takes a training step."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adatom.integrations.transformers import register


def main() -> torch.Tensor:
    """Returns the generated tokens, which are those of the model's own attention."""
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="adatom")  # or from_pretrained(..., attn_...)
    ids = torch.randint(3, 256, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0  # the second prompt is shorter: padded on the left

    tokens = []
    for implementation in ("eager", "adatom"):
        model.set_attn_implementation(implementation)
        tokens.append(model.eval().generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False))
    assert torch.equal(*tokens)

    loss = model.train()(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    loss.backward()
    print(f"generated {tokens[1][:, 12:].tolist()}, loss {loss:.3f}")
    return tokens[1]


if __name__ == "__main__":
    main()
