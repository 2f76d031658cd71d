"""``attn_implementation="jitfmha_flash"``: tiny random models of Transformers against eager ones.

The expected results are those of the same model in float64, with Transformers' own eager attention.
"""

import copy
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import jitfmha

NAME = "jitfmha_flash"
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VOCABULARY = 64
# One head dimension and one dtype for all: every other one would need kernels of its own.
DECODER = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    **SPECIAL,
}
WINDOW = {"sliding_window": 5}
SCORES = {"query_pre_attn_scalar": 48, "attn_logit_softcapping": 2.0}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
BERT = {
    **{n: DECODER[n] for n in ("intermediate_size", "num_hidden_layers", "initializer_range")},
    "hidden_size": 128,
    "num_attention_heads": 2,
    "vocab_size": VOCABULARY,
}
BART = {
    "d_model": 128,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32),
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "init_std": 0.2,
    "decoder_start_token_id": 1,
    **SPECIAL,
}
T5 = {
    "d_model": 64,
    "d_kv": 64,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": VOCABULARY,
    "decoder_start_token_id": 1,
    **SPECIAL,
}
CHUNKS = {"attention_chunk_size": 5, "intermediate_size_mlp": 32}
# All of them are chosen: where two are nearly as good, rounding would choose one.
ALL_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), 2),
    "moe_intermediate_size": 32,
    "experts_implementation": "eager",
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "mistral": ("MistralForCausalLM", "MistralConfig", DECODER | WINDOW),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", DECODER | WINDOW | SCORES),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", DECODER | WINDOW | EXPERTS),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", DECODER | CHUNKS | ALL_EXPERTS),
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
}
DECODERS = [name for name in MODELS if name not in ("bert", "bart", "t5")]


# ---- Others, of which one is drawn ---------------------------------------------------------------

WIDE = DECODER | {"hidden_size": 128}
GPT = {"n_embd": 128, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 64}
GPT |= {"initializer_range": 0.2, **SPECIAL}
TEXT = BERT | {"max_position_embeddings": 64, **SPECIAL}
IMAGE_SIZE, AUDIO_LENGTH = 16, 200
IMAGES = BERT | {"image_size": IMAGE_SIZE, "patch_size": 4}
del IMAGES["vocab_size"]
LATENT = {n: x for n, x in DECODER.items() if n != "head_dim"} | {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "num_key_value_heads": 2,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "shared_expert_intermediate_size": 32,
}
MAMBA = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "mamba_d_state": 8,
    "mamba_dt_rank": 8,
    "use_mamba_kernels": False,
}
AUDIO = BERT | {
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "mask_time_prob": 0.0,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
DISTIL = {"dim": 128, "hidden_dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": VOCABULARY}
BY_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
# By default scores are not scaled, which magnifies what float32 rounds.
SCALED = {"attention_multiplier": 64**-0.5}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32}
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ALBERT": ("AlbertModel", "AlbertConfig", BERT | {"embedding_size": 32}),
    "CLIP": ("CLIPVisionModel", "CLIPVisionConfig", IMAGES),
    "CLIP (text)": ("CLIPTextModel", "CLIPTextConfig", TEXT),
    "DeepSeek-V2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", ALL_EXPERTS | LATENT),
    "DINOv2": ("Dinov2Model", "Dinov2Config", IMAGES),
    "DistilBERT": ("DistilBertModel", "DistilBertConfig", DISTIL | {"initializer_range": 0.2}),
    "EXAONE 4": ("Exaone4ForCausalLM", "Exaone4Config", DECODER | WINDOW | BY_LAYERS),
    "GLM-4": ("Glm4ForCausalLM", "Glm4Config", DECODER),
    "GPT-BigCode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT),
    "GPT-J": ("GPTJForCausalLM", "GPTJConfig", GPT | {"rotary_dim": 16}),
    "Granite": ("GraniteForCausalLM", "GraniteConfig", WIDE | SCALED),
    "Jamba": ("JambaForCausalLM", "JambaConfig", WIDE | ALL_EXPERTS | MAMBA),
    "LFM2": ("Lfm2ForCausalLM", "Lfm2Config", WIDE | CONVOLUTIONS),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", DECODER | ALL_EXPERTS),
    "OLMo 2": ("Olmo2ForCausalLM", "Olmo2Config", WIDE),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", DECODER | ALL_EXPERTS),
    "Qwen3-Next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", DECODER | ALL_EXPERTS | LINEAR),
    "RoBERTa": ("RobertaModel", "RobertaConfig", TEXT),
    "SigLIP": ("SiglipVisionModel", "SiglipVisionConfig", IMAGES),
    "SigLIP (text)": ("SiglipTextModel", "SiglipTextConfig", TEXT),
    "StarCoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", WIDE | WINDOW),
    "wav2vec 2.0": ("Wav2Vec2Model", "Wav2Vec2Config", AUDIO),
}
# Those that compute attention by themselves.
WITHOUT_INTERFACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 64, "n_layer": 1, "n_head": 1}),
    "DeBERTa-v2": ("DebertaV2Model", "DebertaV2Config", BERT),
    "Falcon": ("FalconForCausalLM", "FalconConfig", {"hidden_size": 64, "num_hidden_layers": 1}),
    "MPT": ("MptForCausalLM", "MptConfig", {"d_model": 64, "n_heads": 1, "n_layers": 1}),
}


@pytest.fixture(scope="module")
def transformers() -> Iterator[Any]:
    """Imported here, not by every process that only collects tests; it takes seconds."""
    library = pytest.importorskip("transformers")
    from transformers import masking_utils

    from jitfmha.integrations.transformers import register

    register()
    masks = masking_utils.AttentionMaskInterface._global_mapping
    eager_mask = masks["eager"]

    def finite_mask(*arguments: Any, **named: Any) -> Tensor:
        # Eager attention converts scores to float32, in which the least float64 is -inf, and a row
        # of padding would be NaN.
        return eager_mask(*arguments, **{**named, "dtype": torch.float32})

    masks["eager"] = finite_mask
    yield library
    masks["eager"] = eager_mask


@pytest.fixture
def pair(transformers: Any, seed: int) -> Callable[..., tuple[Any, Any]]:
    """Makes a model with this package's attention, and the same in float64 with eager attention."""

    def make(name: str, **changes: Any) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model, config, options = {**MODELS, **ARCHITECTURES}[name]
        config = getattr(transformers, config)(**options, **changes)
        ours = getattr(transformers, model)(config).eval()
        for parameter in ours.parameters():  # biases and sinks start as 0
            if parameter.dim() == 1:
                parameter.data += torch.randn_like(parameter) * 0.3
        expected = copy.deepcopy(ours).double()
        expected.set_attn_implementation("eager")
        ours.set_attn_implementation(NAME)
        assert ours.config._attn_implementation == NAME
        return ours, expected

    return make


def random_tokens(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=rng)


def padding(lengths: list[int], longest: int, side: str) -> Tensor:
    """The mask of sequences of these lengths, with padding on their left or right side."""
    place = torch.arange(longest)
    if side == "left":
        place = place.flip(0)
    return (place < torch.tensor(lengths)[:, None]).long()


def assert_close(ours: Tensor, expected: Tensor, rounding: float = 0.0) -> None:
    """``rounding`` is the largest error of the same model in float32 with eager attention: some
    drawn models magnify what float32 rounds."""
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, atol=max(3e-5, 2 * rounding), rtol=1e-4)


def arguments(name: str, rng: torch.Generator, seqlen: int = 12) -> dict[str, Tensor]:
    """Inputs of four sequences; encoders' decoders get others."""
    given = {"input_ids": random_tokens(rng, 4, seqlen)}
    if name in ("bart", "t5"):
        given["decoder_input_ids"] = random_tokens(rng, 4, seqlen)
    return given


# ---- Forward -------------------------------------------------------------------------------------

CASES = list(itertools.product(MODELS, ["none", "left", "right"]))


@pytest.mark.sample(("name", "side"), CASES, 2)
def test_forward(pair, rng, name, side):
    ours, expected = pair(name)
    given = arguments(name, rng)
    tokens = torch.ones(4, 12).bool()
    if side != "none":
        given["attention_mask"] = padding([12, 1, 7, 11], 12, side)
        if "decoder_input_ids" not in given:
            tokens = given["attention_mask"].bool()
    eager = copy.deepcopy(ours)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        logits = expected(**given).logits[tokens]
        rounding = float((eager(**given).logits[tokens] - logits).abs().max())
        assert rounding < 1e-3
        assert_close(ours(**given).logits[tokens], logits, rounding)


@pytest.mark.sample("name", [*ARCHITECTURES], 1)
def test_architecture(pair, rng, name):
    """The results of all tokens, and the gradients of all parameters."""
    ours, expected = pair(name)
    eager = copy.deepcopy(ours)
    eager.set_attn_implementation("eager")
    lengths, longest = [12, 1, 7, 11], 12
    if isinstance(getattr(ours.config, "image_size", None), int):
        given = {"pixel_values": torch.randn(4, 3, IMAGE_SIZE, IMAGE_SIZE, generator=rng)}
        sides = ["none"]
    elif "input_values" in ours.main_input_name:
        lengths, longest = [200, 60, 77, 199], AUDIO_LENGTH
        given = {"input_values": torch.randn(4, AUDIO_LENGTH, generator=rng)}
        sides = ["none", "right"]
    else:
        given = {"input_ids": random_tokens(rng, 4, longest)}
        sides = ["none", "left", "right"]
    for side in sides:
        tokens: Any = slice(None)
        if side != "none":
            given["attention_mask"] = padding(lengths, longest, side)
            if "input_ids" in given:
                tokens = given["attention_mask"].bool()
        results = []
        for model in (ours, eager, expected):
            dtype = torch.float64 if model is expected else torch.float32
            cast = {n: x.to(dtype) if x.is_floating_point() else x for n, x in given.items()}
            results.append(model(**cast)[0][tokens])
        rounding = float((results[1] - results[2]).detach().abs().max())
        assert rounding < 1e-3
        assert_close(results[0], results[2], rounding)
    weight = torch.randn(results[0].shape, generator=rng)
    for result in results:
        (result * weight).sum().backward()
    assert_same_gradients(ours, expected)


def test_a_window_that_hides_one_key(pair, rng):
    ours, expected = pair("mistral")
    given = arguments("mistral", rng, WINDOW["sliding_window"] + 1)
    with torch.no_grad():
        assert_close(ours(**given).logits, expected(**given).logits)


def test_mask_of_four_dimensions(pair, rng):
    """Which keys are seen is then what the mask says, and nothing else."""
    ours, expected = pair("llama")
    given = arguments("llama", rng, 7)
    seen = torch.rand(4, 1, 7, 7, generator=rng) < 0.5
    seen |= torch.eye(7, dtype=torch.bool)
    hidden = torch.zeros(4, 1, 7, 7).masked_fill(~seen, -1e30)
    with torch.no_grad():
        wanted = expected(**given, attention_mask=hidden.double()).logits
        assert_close(ours(**given, attention_mask=seen).logits, wanted)


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
def test_packed(pair, rng, by):
    """Sequences in one row, against each by itself."""
    ours, expected = pair("llama")
    lengths = [1, 7, 1, 8, 5]
    rows = [random_tokens(rng, 1, n) for n in lengths]
    given: dict[str, Any] = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    if by == "cu_seq_lens":
        sums = torch.tensor([0, *itertools.accumulate(lengths)])
        given |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), sums)
        given |= {"max_length_q": 8, "max_length_k": torch.tensor(8)}
    with torch.no_grad():
        packed = ours(torch.cat(rows, 1), **given).logits
        alone = torch.cat([expected(row).logits for row in rows], 1)
    assert_close(packed, alone)


def test_packed_rows_of_a_batch(pair, rng):
    """Their own restarts for each row, found as Transformers' masks find them."""
    ours, expected = pair("mistral")
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 0, 1, 2]])
    given = {"input_ids": random_tokens(rng, 2, 7), "position_ids": position_ids}
    with torch.no_grad():
        wanted = expected(**given, use_cache=False).logits
        assert_close(ours(**given, use_cache=False).logits, wanted)


# ---- Generation ----------------------------------------------------------------------------------

GENERATION: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "static beams": {"cache_implementation": "static", "num_beams": 2},
}
GENERATORS = [name for name in MODELS if name != "bert"]


@pytest.mark.sample(("name", "how"), [*itertools.product(GENERATORS, GENERATION)], 1)
def test_generate(pair, rng, name, how):
    """Behind the window's length, too."""
    ours, expected = pair(name)
    given = {
        "inputs": random_tokens(rng, 3, 7),
        "attention_mask": padding([7, 1, 6], 7, "left"),
        "max_new_tokens": 6,
        "min_new_tokens": 6,
        "do_sample": False,
        **GENERATION[how],
    }
    assert torch.equal(ours.generate(**given), expected.generate(**given))


@pytest.mark.sample("name", DECODERS, 1)
def test_chunks_of_a_prompt(pair, transformers, rng, name):
    """With a cache, queries are the last of the keys; a static one has room behind these."""
    ours, expected = pair(name)
    tokens = random_tokens(rng, 2, 16)
    with torch.no_grad():
        wanted = expected(tokens).logits
        for cache in (
            transformers.DynamicCache(config=ours.config),
            transformers.StaticCache(config=ours.config, max_cache_len=20),
        ):
            seen = 0
            for length in (7, 1, 8):
                step = tokens[:, seen : seen + length]
                logits = ours(step, past_key_values=cache).logits
                assert_close(logits, wanted[:, seen : seen + length])
                seen += length


# ---- Training ------------------------------------------------------------------------------------


@pytest.mark.sample(("name", "side"), [c for c in CASES if c[1] != "left"], 1)
def test_training_step(pair, rng, name, side):
    """The gradients of all parameters, sinks and position biases among them."""
    given = arguments(name, rng)
    labels = random_tokens(rng, 4, 12)
    if side != "none":
        mask = padding([12, 1, 7, 11], 12, side)
        given["attention_mask"] = mask
        labels = labels.masked_fill(mask == 0, -100)
    check_training_step(pair(name), given, labels)


@pytest.mark.parametrize("level", [torch.finfo(torch.float32).min, -1e9])
def test_training_step_with_an_additive_mask(pair, rng, level):
    """Queries of padding on the left see nothing but hidden keys, and nobody wants them."""
    given = arguments("llama", rng)
    mask = padding([12, 1, 7, 11], 12, "left")
    seen = torch.ones(12, 12, dtype=torch.bool).tril() & mask[:, None, None].bool()
    given["attention_mask"] = torch.zeros(seen.shape).masked_fill(~seen, level)
    given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    labels = random_tokens(rng, 4, 12).masked_fill(mask == 0, -100)
    check_training_step(pair("llama"), given, labels)


def check_training_step(models: tuple[Any, Any], given: dict[str, Tensor], labels: Tensor) -> None:
    """The gradients of the first model's parameters are those of the second."""
    ours, expected = models
    for model in models:
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            for dropout in ("dropout", "attention_dropout"):
                if isinstance(getattr(module, dropout, None), float):
                    setattr(module, dropout, 0.0)
        model(**given, labels=labels).loss.backward()
    assert_same_gradients(ours, expected)


def assert_same_gradients(ours: Any, expected: Any) -> None:
    gradients = {n: x.grad for n, x in ours.named_parameters() if x.grad is not None}
    wanted = {n: x.grad for n, x in expected.named_parameters() if x.grad is not None}
    assert gradients.keys() == wanted.keys()
    largest = max(float(x.abs().max()) for x in wanted.values())
    for parameter, gradient in wanted.items():
        # Gradients are small sums of large terms; some, such as that of a key's bias, are 0.
        atol = 1e-4 * max(float(gradient.abs().max()), 0.01 * largest)
        torch.testing.assert_close(gradients[parameter].double(), gradient, atol=atol, rtol=1e-3)


# ---- torch.compile -------------------------------------------------------------------------------


def test_compiled_decoding(pair, transformers, rng, pytestconfig):
    """One graph for all steps: nothing reads how far the static cache is filled."""
    if not pytestconfig.getoption("--exhaustive"):
        pytest.skip("tracing a model takes seconds; --exhaustive does it")
    ours, expected = pair("llama")
    tokens = random_tokens(rng, 2, 10)
    cache = transformers.StaticCache(config=ours.config, max_cache_len=16)
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    step = torch.compile(ours.forward, backend=count, fullgraph=True)
    with torch.no_grad():
        wanted = expected(tokens).logits
        ours(tokens[:, :6], past_key_values=cache)
        for seen in range(6, 10):
            given = {"position_ids": torch.tensor([[seen]]), "past_key_values": cache}
            logits = step(tokens[:, seen : seen + 1], **given).logits
            assert_close(logits, wanted[:, seen : seen + 1])
    assert len(graphs) == 1


# ---- What Transformers finds, and what is refused ------------------------------------------------


def test_other_names_are_checked_as_before(transformers):
    from transformers.modeling_utils import PreTrainedModel

    from jitfmha.integrations.transformers import register

    check = PreTrainedModel._check_and_adjust_attn_implementation
    register()
    assert PreTrainedModel._check_and_adjust_attn_implementation is check
    model, config, options = MODELS["llama"]
    small = getattr(transformers, config)(**options)
    with pytest.raises(ValueError, match=f"no_such_attention.* There is '{NAME}', too"):
        getattr(transformers, model)._from_config(small, attn_implementation="no_such_attention")
    made = getattr(transformers, model)._from_config(small, attn_implementation=NAME)
    assert made.config._attn_implementation == NAME


@pytest.mark.parametrize("name", WITHOUT_INTERFACE)
def test_models_without_the_interface_are_refused(transformers, name):
    model, config, options = WITHOUT_INTERFACE[name]
    made = getattr(transformers, config)(**{**options, "vocab_size": VOCABULARY})
    with pytest.raises(NotImplementedError, match=f"{model} .*'{NAME}' would change"):
        getattr(transformers, model)._from_config(made, attn_implementation=NAME)


def test_the_table_of_models():
    """It has those that are run here, and no others."""
    page = Path(__file__).resolve().parents[1] / "docs" / "drop_ins.md"
    rows = re.findall(r"^\| (.*) \| (?:run|refused)", page.read_text("utf-8"), re.MULTILINE)

    def plain(names: Iterable[str]) -> set[str]:
        return {re.sub(r"[\W_]", "", name.removesuffix(" (text)").lower()) for name in names}

    run = [MODELS, ARCHITECTURES, WITHOUT_INTERFACE]
    assert [plain(row.split(", ")) for row in rows] == [plain(models) for models in run]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"output_attentions": True}, "output_attentions=True"),
        ({"cache": object()}, r"cache \(object\)"),
        ({"indices": torch.zeros(1)}, r"indices \(Tensor\)"),
        ({"position_bias": torch.zeros(1, 1, 3, 3)}, r"position_bias .*\(1, 1, 3, 3\).* packed"),
    ],
)
def test_what_is_not_served_is_refused(transformers, given, text):
    attention = transformers.AttentionInterface._global_mapping[NAME]
    x = torch.zeros(1, 1, 3, 64)
    if "position_bias" in given:
        given["position_ids"] = torch.tensor([[0, 0, 1]])
    with pytest.raises(NotImplementedError, match=text):
        attention(torch.nn.Module(), x, x, x, None, **given)


def test_flash_attention_2_finds_the_stand_in(transformers, monkeypatch):
    """Where there is a GPU; Transformers looks for the package and its version."""
    from transformers import modeling_flash_attention_utils as flash
    from transformers.utils import import_utils

    monkeypatch.setattr(sys, "path", [])  # what else is installed takes seconds to list
    questions = (
        import_utils._package_distribution_mapping,
        import_utils.is_flash_attn_2_available,
        import_utils.is_flash_attn_greater_or_equal,
    )
    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    try:
        for question in questions:
            question.cache_clear()
        assert not import_utils.is_flash_attn_2_available()
        for question in questions:
            question.cache_clear()
        with jitfmha.install_as("flash_attn"):
            assert import_utils.is_flash_attn_2_available()
            assert import_utils.is_flash_attn_greater_or_equal("2.8.0")
            assert not import_utils.is_flash_attn_greater_or_equal("2.9.0")
            found = flash._lazy_imports("flash_attention_2")
    finally:
        for question in questions:
            question.cache_clear()
    assert found[:3] == (
        jitfmha.flash_attn_func,
        jitfmha.flash_attn_varlen_func,
        jitfmha.flash_attn_with_kvcache,
    )
    assert [f.__module__ for f in found[3:]] == ["jitfmha.flash_attn.bert_padding"] * 2
