"""The serving loop of examples/serve.py: its tokens are those of plain generation."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import jitfmha
from jitfmha.amd.chips import Arch

FILE = Path(__file__).resolve().parents[1] / "examples" / "serve.py"
PAGE_SIZE, NEW_TOKENS, VOCABULARY = 8, 9, 256


@pytest.fixture(scope="module")
def serve() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("serve", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["serve"]


class Workload:
    """A random model, prompts with one beginning, and what plain generation makes of them."""

    def __init__(self, serve: Any, seed: int, lengths: list[int], beginning: int) -> None:
        torch.manual_seed(seed)
        self.serve = serve
        self.model = serve.Llama(serve.ModelShape(vocabulary=VOCABULARY))
        first = random_tokens(beginning)
        self.expected: dict[tuple[int, ...], list[int]] = {}
        for length in lengths:
            margin = 0.0
            while margin < 1e-3:  # else rounding may decide
                prompt = first + random_tokens(length - beginning)
                tokens, margin = serve.generate(self.model, prompt, NEW_TOKENS)
            self.expected[tuple(prompt)] = tokens

    def guess(self, tokens: list[int]) -> list[int]:
        """What comes, but for every third token."""
        for prompt, new in self.expected.items():
            whole = [*prompt, *new]
            if whole[: len(tokens)] == tokens:
                rest = enumerate(whole)
                return [x if i % 3 else (x + 1) % VOCABULARY for i, x in rest][len(tokens) :]
        raise AssertionError("tokens that plain generation does not have")

    def server(self, num_pages: int, rows_per_step: int) -> Any:
        pool = self.serve.PagePool(self.model, num_pages, PAGE_SIZE)
        pool.k.fill_(torch.nan)
        pool.v.fill_(torch.nan)
        return self.serve.Server(self.model, pool, rows_per_step=rows_per_step, guess=self.guess)

    def check(self, server: Any) -> None:
        """Serve all of them; each gets its tokens, and all pages are given back."""
        requests = self.serve.serve(server, [list(x) for x in self.expected], NEW_TOKENS)
        for request, (prompt, new) in zip(requests, self.expected.items(), strict=True):
            assert request.tokens == [*prompt, *new]
        assert server.pool.available == server.pool.num_pages
        assert 0 < server.counts.right < server.counts.guessed


def random_tokens(number: int) -> list[int]:
    tokens: list[int] = torch.randint(VOCABULARY, (number,)).tolist()
    return tokens


def test_tokens(serve, seed):
    """With room for two requests, and with prompts that are longer than a step."""
    work = Workload(serve, seed, lengths=[40, 17, 33, 64, 19, 29], beginning=16)
    server = work.server(num_pages=12, rows_per_step=24)
    work.check(server)
    assert server.counts.shared >= 16 * 5
    assert server.counts.preempted > 0


def test_a_prompt_that_is_known(serve, seed):
    """All but the page of its last token is there already, as long as nobody needs the pages."""
    work = Workload(serve, seed, lengths=[32], beginning=0)
    server = work.server(num_pages=8, rows_per_step=64)
    for times in range(3):
        work.check(server)
        assert server.counts.shared == 24 * times
    server.guess = lambda _: []
    server.add(random_tokens(60), 1)
    server.step()
    work.check(server)  # whose pages have gone to another prompt
    assert server.counts.shared == 24 * 2


@pytest.mark.sample("arch", get_args(Arch), 1)
def test_tokens_on_gpus(serve, seed, arch):
    work = Workload(serve, seed, lengths=[19, 26], beginning=8)
    with jitfmha.emulate(arch, check=True) as run:
        work.check(work.server(num_pages=8, rows_per_step=24))
    assert run.findings() == ()


def test_the_script(serve, monkeypatch, capsys):
    arguments = ["--requests", "2", "--new-tokens", "4", "--page-size", "8"]
    monkeypatch.setattr(sys, "argv", ["serve.py", *arguments])
    assert serve.main() == 0
    assert capsys.readouterr().out.count("new: as by plain generation") == 2
    monkeypatch.setattr(jitfmha, "fmha_fwd", lambda q, *_, **__: torch.zeros_like(q))
    assert serve.main() == 1
    assert "NOT as by plain generation" in capsys.readouterr().out


def test_what_has_no_room_is_refused(serve):
    model = serve.Llama(serve.ModelShape())
    server = serve.Server(model, serve.PagePool(model, 2, PAGE_SIZE))
    for prompt, new in (([], 1), ([1], 0), ([1] * 10, 7)):
        with pytest.raises(ValueError, match=f"{len(prompt)} tokens and {new} new ones.* 16"):
            server.add(prompt, new)
