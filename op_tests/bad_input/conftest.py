"""How many examples a test draws, from which seed, and what became of them all."""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
import torch
from contract import Sweep, Tally
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis.strategies import SearchStrategy

_SHORT, _LONG = 25, 1250  # examples of a test
_RETURNED, _REFUSED = 5, 12  # one in so many must be returned, and one refused
_ENOUGH = 200  # calls to say so of

_tallies: dict[str, Tally] = {}


@pytest.fixture
def sweep(request: pytest.FixtureRequest, seed: int, num_threads: None) -> Sweep:
    """Checks what a strategy draws: ``sweep(strategy, check)``, and that there is enough of both.

    ``check`` gets each example and a :class:`Tally`. With ``--seed`` and ``--exhaustive`` the seed
    is the run's and the test's, and otherwise the test's alone: what fails once in a thousand draws
    is for those to find. ``share`` is what part of a full test's examples are drawn.
    """
    is_long = request.config.getoption("--exhaustive")
    is_drawn_anew = is_long or request.config.getoption("--seed") is not None
    if not is_drawn_anew:
        seed = Random(request.node.nodeid).getrandbits(31)

    def run(
        strategy: SearchStrategy[object],
        check: Callable[[object, Tally], None],
        *,
        share: float = 1.0,
    ) -> Tally:
        tally = _tallies.setdefault(request.node.nodeid, Tally())
        examples = max(1, round((_LONG if is_long else _SHORT) * share))

        @hypothesis_seed(seed)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=False,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
            report_multiple_bugs=False,
        )
        @given(strategy)
        def examined(example: object) -> None:
            check(example, tally)

        torch.set_num_threads(1)  # see all_threads
        examined()
        request.node.user_properties.append(("bad input", dict(tally.ended)))
        _check_shares(tally)
        _check_shares(_all())
        return tally

    return run


def _all() -> Tally:
    return Tally(sum((tally.ended for tally in _tallies.values()), start=Counter()))


def _check_shares(tally: Tally) -> None:
    """That many calls were valid and many were not, where there are enough to tell."""
    total = sum(tally.ended.values())
    if total < _ENOUGH:
        return
    assert tally.returned * _RETURNED >= total, f"hardly a valid call: {tally.ended}"
    assert tally.refused * _REFUSED >= total, f"hardly a call to be refused: {tally.ended}"
