"""Every causal family of `transformers` that can be built tiny, ours beside its own."""

import os
from pathlib import Path

import pytest
import torch

from attnlib import ScaledDotProductAttention, hf
from attnlib.delta import delta_rule, unit_length
from attnlib.logits import keep_min_p, keep_top_p, penalize

ROOT = Path(__file__).resolve().parents[2]
os.environ["HF_HUB_OFFLINE"] = "1"
# Families whose layers ask for no attention that is registered.
OWN = {
    "big_bird", "bloom", "codegen", "cpmant", "falcon", "falcon_mamba",
    "gpt_neox_japanese", "gptj", "mamba", "megatron-bert", "mpt", "mvp", "openai-gpt",
    "prophetnet", "rembert", "roformer", "rwkv", "trocr", "xglm", "xlm", "xlnet",
    "xlstm",
}  # fmt: skip
# Those that are large however small the numbers below are, or take minutes to build.
HEAVY = {
    "blt", "dots3_note", "emu3", "falcon_h1", "fuyu", "gemma3", "gemma4", "gemma4_text",
    "gemma4_unified", "git", "got_ocr2", "llama4", "mllama", "moss_transcribe_diarize",
    "phi4_multimodal", "qwen3_5", "qwen3_5_moe",
}  # fmt: skip
# Those that refuse these numbers or fail with an attention of their own, too; whose layers
# with attention stand deeper; or whose recurrent layers carry on what padding has made.
OTHERS = {
    "axk1", "axk2", "bailing_hybrid", "bamba", "cohere_compass_text", "dbrx",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "dots3_note_text", "gemma3n",
    "gemma3n_text", "gemma4_assistant", "gemma4_unified_assistant", "glm4_moe_lite",
    "glm_moe_dsa", "gpt_neo", "granitemoehybrid", "hy_v4", "inkling2_text",
    "kimi_linear", "lfm2_moe", "longcat_flash", "mamba2", "minicpm3", "musicgen",
    "musicgen_melody", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "reformer",
    "xmod", "youtu", "zamba", "zamba2", "zaya",
}  # fmt: skip
# How many layers it takes until one attends.
DEEPER = {
    "lfm3": 4,
    "qwen3_5_moe_text": 4,
    "qwen3_5_text": 4,
    "qwen3_next": 4,
    "jamba": 5,
}
SIZES = {
    **{"vocab_size": 61, "initializer_range": 0.2, "sliding_window": 5, "rotary_dim": 8},
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **{"head_dim": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "dropout"), 0.0),
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
}
IDS = torch.randint(1, 61, (3, 11), generator=torch.Generator().manual_seed(0))
REAL = torch.tensor([[1] * 11, [0] * 4 + [1] * 7, [0] + [1] * 10])


class Counting(ScaledDotProductAttention):
    calls = 0

    def forward(self, *inputs, **options):
        Counting.calls += 1
        return super().forward(*inputs, **options)


def families(transformers):
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return sorted({*names} - HEAVY - OTHERS)


def tiny(transformers, kind):
    plain = transformers.AutoConfig.for_model(kind)
    known = {*plain.to_dict(), *plain.attribute_map}
    sizes = SIZES | {"num_hidden_layers": DEEPER.get(kind, 2)}
    config = type(plain)(**{n: size for n, size in sizes.items() if n in known})
    torch.manual_seed(22)
    make = transformers.AutoModelForCausalLM.from_config
    return make(config, attn_implementation="eager").eval()


@pytest.mark.costly("outside/transformers")
def test_every_family_that_asks_gets_the_same():
    """Left padding and all; who does not ask is named on the page for engineers."""
    transformers = pytest.importorskip("transformers", reason="it is not installed")
    hf.register("counting", Counting())
    own, same = set(), 0
    for kind in families(transformers):
        model, Counting.calls = tiny(transformers, kind), 0
        with torch.no_grad():
            options = {"attention_mask": REAL, "use_cache": False}
            expected = model(IDS, **options).logits[REAL.bool()]
            if kind in OWN:
                with pytest.raises(TypeError, match="which keeps its own"):
                    hf.register("counting", Counting(), model=model)
                model.set_attn_implementation("counting")
            else:
                hf.register("counting", Counting(), model=model)
            found = model(IDS, **options).logits[REAL.bool()]
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-5, msg=kind)
        own |= set() if Counting.calls else {kind}
        same += bool(Counting.calls)
    assert own == OWN and same == 113
    page = (ROOT / "book" / "engineers.md").read_text("utf-8")
    assert not [kind for kind in OWN if f"`{kind}`" not in page]
    assert f"by name: {same} of those" in page


def test_the_cuts_of_logits_are_transformers():
    """Top-p, min-p and the penalty, token by token, on logits that no two of are equal."""
    from transformers import generation as theirs

    torch.manual_seed(3)
    ids = torch.randint(50, (20, 9))
    for spread, limit in ((0.5, 0.3), (2.0, 0.9), (4.0, 0.05)):
        logits = spread * torch.randn(20, 50)
        for warper, ours in (
            (theirs.TopPLogitsWarper(limit), keep_top_p(logits, limit)),
            (theirs.MinPLogitsWarper(limit), keep_min_p(logits, limit)),
            (theirs.RepetitionPenaltyLogitsProcessor(1.3), penalize(logits, ids, 1.3)),
        ):
            assert torch.equal(warper(ids, logits), ours)


def test_the_delta_rule_is_that_of_qwen3_next():
    """Its loop and its pieces, and ours, in texts of four lengths; it scales the query."""
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    torch.manual_seed(0)
    for n in (1, 5, 64, 150):
        q, k = unit_length(torch.randn(2, 2, n, 3, 8))
        v, beta, g = torch.randn(2, n, 3, 5), torch.rand(2, n, 3), -torch.rand(2, n, 3)
        state = torch.randn(2, 3, 8, 5)
        heads = [x.transpose(1, 2) for x in (q * 8**-0.5, k, v, beta, g)]
        output, end = delta_rule(*heads, state)
        for rule in (
            theirs.torch_recurrent_gated_delta_rule,
            theirs.torch_chunk_gated_delta_rule,
        ):
            asked = {
                "g": g,
                "beta": beta,
                "initial_state": state,
                "output_final_state": True,
            }
            expected, last = rule(q, k, v, **asked)
            assert torch.allclose(output.transpose(1, 2), expected, atol=1e-5), rule
            assert torch.allclose(end, last, atol=1e-5), rule
