"""A serving loop over a paged KV cache, small enough to be read in one sitting.

It has what a serving framework does with attention kernels, and nothing else:

    continuous batching      requests come and go between steps; a step is one forward pass over
                             the packed rows of all requests that have something to compute
    chunked prefill          a step has a budget of rows; prompts that do not fit go on in the next
    prefix sharing           full pages are known by a hash of all tokens up to their end; a prompt
                             that begins as an earlier one did takes its pages
    speculative verification tokens that are guessed go through the model together; those before
                             the first wrong one are kept
    preemption               where pages run out, the newest request gives its own back and waits

All of it ends in one call of ``jitfmha.fmha_fwd`` for each layer, with ``cu_seqlens`` and a
``block_table``: decoding, chunks of prompts and verification differ in their numbers of rows only.

The model is Llama's in small, with random weights. Each request is compared with plain generation,
which computes everything anew for each token, with attention in plain torch.

Run it with:  python examples/serve.py [--device cpu|cuda|gfx942|gfx950]
gfx942 and gfx950 are emulated. The exit code is 1 where a request got other tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

import jitfmha

# ---- The model -----------------------------------------------------------------------------------

# Of a layer: its number, q (rows, heads, hdim), k and v (rows, kv heads, hdim); the result is as q.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model of Llama's kind."""

    vocabulary: int = 256
    width: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    hdim: int = 64
    feed_forward: int = 256


class Layer(nn.Module):
    """Attention and a gated feed-forward network, each behind a norm."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
        self.hdim = shape.hdim
        self.qkv = nn.Linear(shape.width, sum(self.sizes) * shape.hdim, bias=False)
        self.out = nn.Linear(shape.heads * shape.hdim, shape.width, bias=False)
        self.gate_up = nn.Linear(shape.width, 2 * shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.width, bias=False)

    def forward(self, x: Tensor, number: int, rotation: Tensor, attend: Attend) -> Tensor:
        heads = self.qkv(rms_norm(x, x.shape[-1:])).unflatten(-1, (-1, self.hdim))
        q, k, v = heads.split(self.sizes, dim=1)
        attended = attend(number, rotated(q, rotation), rotated(k, rotation), v)
        x = x + self.out(attended.flatten(1))
        gate, up = self.gate_up(rms_norm(x, x.shape[-1:])).chunk(2, dim=-1)
        fed: Tensor = self.down(silu(gate) * up)
        return x + fed


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary position embedding: both halves of a head are a complex number, which is turned."""
    a, b = x.float().chunk(2, dim=-1)
    turned = torch.complex(a, b) * rotation[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


class Llama(nn.Module):
    """Random weights, with which a token's choice depends on all before it."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The last hidden states of packed rows, ``(rows, width)``."""
        even = torch.arange(0, self.shape.hdim, 2, device=tokens.device)
        angle = positions[:, None] * 10000.0 ** (-even / self.shape.hdim)
        rotation = torch.polar(torch.ones_like(angle), angle)
        x: Tensor = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, number, rotation, attend)
        return rms_norm(x, x.shape[-1:])

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits


@torch.no_grad()
def generate(model: Llama, prompt: list[int], new_tokens: int) -> tuple[list[int], float]:
    """Plain greedy generation, without a cache.

    Returns the new tokens, and by how much the best logit was at least above the second one: where
    that is next to nothing, rounding decides.
    """
    device = model.embedding.weight.device
    tokens, margin = list(prompt), float("inf")
    for _ in range(new_tokens):
        positions = torch.arange(len(tokens), device=device)
        hidden = model(torch.tensor(tokens, device=device), positions, plain_attention)
        best = model.logits(hidden[-1]).float().topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :], margin


def plain_attention(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    is_hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(is_hidden, -torch.inf).softmax(-1), v)


# ---- The pages -----------------------------------------------------------------------------------


class PagePool:
    """Keys and values of all layers, and who uses which page.

    Attributes:
        k, v: ``(layers, num_pages, page_size, kv heads, hdim)``, allocated once. A page number is
            the same page in all layers.
        idle: pages that nobody uses, but whose contents are known, the longest unused one first.
    """

    def __init__(self, model: Llama, num_pages: int, page_size: int) -> None:
        shape, like = model.shape, model.embedding.weight
        sizes = (shape.layers, num_pages, page_size, shape.kv_heads, shape.hdim)
        self.k, self.v = (torch.empty(sizes, dtype=like.dtype, device=like.device) for _ in "kv")
        self.page_size = page_size
        self.num_pages = num_pages
        self.idle: OrderedDict[int, None] = OrderedDict()
        self._free = deque(range(num_pages))
        self._users = [0] * num_pages
        self._pages: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """How many pages a request could have that is alone."""
        return len(self._free) + len(self.idle)

    def names(self, tokens: list[int]) -> Iterator[bytes]:
        """A name for each full page, which stands for all tokens up to its end."""
        name = b""
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page = torch.tensor(tokens[end - self.page_size : end], dtype=torch.int32)
            name = hashlib.sha256(name + page.numpy().tobytes()).digest()
            yield name

    def take(self) -> int | None:
        """A page to be written, if there is one: a free one, else what was idle the longest."""
        if self._free:
            page = self._free.popleft()
        elif self.idle:
            page, _ = self.idle.popitem(last=False)
            del self._pages[self._names.pop(page)]
        else:
            return None
        self._users[page] = 1
        return page

    def share(self, tokens: list[int]) -> list[int]:
        """The pages that hold the longest known beginning of ``tokens``.

        Not the last token: what comes after it is wanted, so that it is computed in any case.
        """
        shared = []
        for name in self.names(tokens[:-1]):
            page = self._pages.get(name)
            if page is None:
                break
            self.idle.pop(page, None)
            self._users[page] += 1
            shared.append(page)
        return shared

    def publish(self, tokens: list[int], pages: list[int]) -> None:
        """Say what is in the full pages among ``pages``, which begin with ``tokens``."""
        for name, page in zip(self.names(tokens), pages, strict=False):
            if name not in self._pages and page not in self._names:
                self._pages[name] = page
                self._names[page] = name

    def release(self, pages: list[int]) -> None:
        """Give pages back, the last first: a beginning is of use without its end."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                if page in self._names:
                    self.idle[page] = None
                else:
                    self._free.append(page)


# ---- The loop ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """A prompt, what was generated so far, and where its keys and values lie.

    Attributes:
        tokens: the prompt and the new ones.
        cached: of how many of these keys and values lie in ``pages``.
    """

    prompt: list[int]
    new_tokens: int
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        return self.new_tokens - (len(self.tokens) - len(self.prompt))


class Work(NamedTuple):
    """What a step does for a request: its next ``rows`` tokens, and guesses behind them."""

    request: Request
    rows: int
    guesses: list[int]

    @property
    def total(self) -> int:
        return self.rows + len(self.guesses)

    @property
    def gives_tokens(self) -> bool:
        return self.request.cached + self.rows == len(self.request.tokens)


@dataclass
class Counts:
    """What the loop did: in tokens, but for steps and preempted requests."""

    steps: int = 0
    rows: int = 0
    shared: int = 0
    guessed: int = 0
    right: int = 0
    preempted: int = 0


def look_up(tokens: list[int]) -> list[int]:
    """Guess that what followed the last two tokens earlier follows them again."""
    for end in range(len(tokens) - 1, 2, -1):
        if tokens[end - 2 : end] == tokens[-2:]:
            return tokens[end:]
    return []


class Server:
    """Requests over a pool of pages.

    Args:
        rows_per_step: how many rows a step computes at most, of decoding and of prompts together.
        most_guesses: of a request in a step.
        guess: from the tokens of a request to those that it may go on with.
    """

    def __init__(
        self,
        model: Llama,
        pool: PagePool,
        *,
        rows_per_step: int = 32,
        most_guesses: int = 3,
        guess: Callable[[list[int]], list[int]] = look_up,
    ) -> None:
        self.model, self.pool = model, pool
        self.rows_per_step, self.most_guesses, self.guess = rows_per_step, most_guesses, guess
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counts = Counts()

    def add(self, prompt: list[int], new_tokens: int) -> Request:
        capacity = self.pool.num_pages * self.pool.page_size
        if not prompt or new_tokens < 1 or len(prompt) + new_tokens > capacity:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {new_tokens} new ones; there has to be one "
                f"of each, and room for both, which is {capacity}"
            )
        request = Request(prompt, new_tokens, list(prompt))
        self.waiting.append(request)
        return request

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Compute one batch; returns the requests that it has finished."""
        batch = self._schedule()
        predicted = iter(self._predict(batch))
        finished = []
        for work in batch:
            request, was_cached = work.request, work.request.cached
            if work.gives_tokens:
                best = [next(predicted) for _ in range(1 + len(work.guesses))]
                right = 0
                while right < len(work.guesses) and work.guesses[right] == best[right]:
                    right += 1
                request.tokens += best[: right + 1]
                request.cached += right  # behind these are keys of wrong guesses, to be replaced
                self.counts.guessed += len(work.guesses)
                self.counts.right += right
            request.cached += work.rows
            if request.cached // self.pool.page_size > was_cached // self.pool.page_size:
                self.pool.publish(request.tokens[: request.cached], request.pages)
            if request.left == 0:
                self.pool.release(request.pages)
                self.running.remove(request)
                finished.append(request)
        self.counts.steps += 1
        self.counts.rows += sum(work.total for work in batch)
        return finished

    def _schedule(self) -> list[Work]:
        """What the next step computes. Each of it has its pages."""
        batch: dict[Request, Work] = {}
        preempted: list[Request] = []
        budget = self.rows_per_step
        # Those that decode come first: nobody waits for the prompt of another one.
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.cached > 1):
            if budget == 0 or request in preempted:
                continue
            work = self._work(request, budget)
            while not self._reserve(work):
                newest = self.running.pop()
                self._give_back(newest)
                self.waiting.appendleft(newest)
                preempted.append(newest)
                batch.pop(newest, None)
                if newest is request:
                    break
            else:
                batch[request] = work
                budget -= work.total
        self.counts.preempted += len(preempted)
        while self.waiting and budget > 0 and not preempted:
            request = self.waiting[0]
            request.pages = self.pool.share(request.tokens)
            request.cached = len(request.pages) * self.pool.page_size
            work = self._work(request, budget)
            if not self._reserve(work):
                self._give_back(request)
                break
            self.counts.shared += request.cached
            self.running.append(self.waiting.popleft())
            batch[request] = work
            budget -= work.total
        return list(batch.values())

    def _work(self, request: Request, budget: int) -> Work:
        missing = len(request.tokens) - request.cached
        rows, guesses = min(missing, budget), []
        if rows == missing:
            # The last new token is nobody's input.
            most = min(self.most_guesses, budget - rows, request.left - 1)
            guesses = self.guess(request.tokens)[:most]
        return Work(request, rows, guesses)

    def _reserve(self, work: Work) -> bool:
        """Whether the request has, or gets, pages for what the step writes."""
        request, size = work.request, self.pool.page_size
        while len(request.pages) * size < request.cached + work.total:
            page = self.pool.take()
            if page is None:
                return False
            request.pages.append(page)
        return True

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages, request.cached = [], 0

    def _predict(self, batch: list[Work]) -> list[int]:
        """The best next token behind each row of ``batch`` that stands at the end of a request."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []  # where keys and values go, as numbers of rows of all pages
        wanted: list[int] = []
        lengths_q: list[int] = []
        lengths_k: list[int] = []
        size = self.pool.page_size
        for request, rows, guesses in batch:
            begin, end = request.cached, request.cached + rows + len(guesses)
            tokens += [*request.tokens[begin : begin + rows], *guesses]
            positions += range(begin, end)
            slots += (request.pages[i // size] * size + i % size for i in range(begin, end))
            if begin + rows == len(request.tokens):
                wanted += range(len(tokens) - len(guesses) - 1, len(tokens))
            lengths_q.append(end - begin)
            lengths_k.append(end)
        most_pages = max(len(work.request.pages) for work in batch)
        table = [[*r.pages, *[0] * (most_pages - len(r.pages))] for r, _, _ in batch]

        device = self.pool.k.device
        rows_written = torch.tensor(slots, device=device)
        sums_q, sums_k = (prefix_sums(x).to(device) for x in (lengths_q, lengths_k))
        block_table = torch.tensor(table, dtype=torch.int32, device=device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # A row sees the keys of its own step, too, so they are written first.
            keys, values = self.pool.k[layer], self.pool.v[layer]
            keys.flatten(0, 1)[rows_written] = k
            values.flatten(0, 1)[rows_written] = v
            return jitfmha.fmha_fwd(
                *(q, keys, values),
                mask="causal",
                cu_seqlens_q=sums_q,
                cu_seqlens_k=sums_k,
                max_seqlen_q=max(lengths_q),
                max_seqlen_k=max(lengths_k),
                block_table=block_table,
            )

        inputs = (torch.tensor(x, device=device) for x in (tokens, positions))
        hidden = self.model(*inputs, attend)
        ends = torch.tensor(wanted, dtype=torch.int64, device=device)
        best = self.model.logits(hidden[ends]).argmax(-1)
        found: list[int] = best.tolist()  # the one place where a step waits for a GPU
        return found


def prefix_sums(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


# ---- A day at work -------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve requests, and compare their tokens.")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, gfx942 or gfx950 (emulated)")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--pages", type=int, default=16, help="with few, requests are preempted")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--rows-per-step", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    torch.manual_seed(args.seed)
    model = Llama(ModelShape()).to("cuda" if args.device == "cuda" else "cpu")
    system_prompt = torch.randint(256, (args.page_size * 2,)).tolist()
    prompts = [
        system_prompt + torch.randint(256, (5 + 7 * n,)).tolist() for n in range(args.requests)
    ]
    server = Server(
        model,
        PagePool(model, args.pages, args.page_size),
        rows_per_step=args.rows_per_step,
    )
    emulated: AbstractContextManager[object] = nullcontext()
    if args.device.startswith("gfx"):
        emulated = jitfmha.emulate(args.device)
    with emulated:
        requests = serve(server, prompts, args.new_tokens)
    wrong = 0
    for request in requests:
        expected, margin = generate(model, request.prompt, args.new_tokens)
        is_right = request.tokens[len(request.prompt) :] == expected
        wrong += not is_right
        print(
            f"{len(request.prompt):4} tokens of prompt, {args.new_tokens} new: "
            f"{'as' if is_right else 'NOT as'} by plain generation (least margin {margin:.1e})"
        )
    counts = server.counts
    print(
        f"{counts.steps} steps of {counts.rows / counts.steps:.1f} rows in the mean; "
        f"{counts.shared} tokens shared, {counts.right} of {counts.guessed} guesses right, "
        f"{counts.preempted} times preempted"
    )
    return 1 if wrong else 0


def serve(server: Server, prompts: list[list[int]], new_tokens: int) -> list[Request]:
    """All of them, of which the second half comes while the first half is served."""
    half = (len(prompts) + 1) // 2
    requests = [server.add(prompt, new_tokens) for prompt in prompts[:half]]
    later = deque(prompts[half:])
    while server.running or server.waiting or later:
        server.step()
        if later:
            requests.append(server.add(later.popleft(), new_tokens))
    return requests


if __name__ == "__main__":
    sys.exit(main())
