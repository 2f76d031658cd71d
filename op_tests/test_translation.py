"""Python that has no translation to C++ is refused by file and line; the rest is seen in C++."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from jitfmha.export.policy import policy_in_cpp
from jitfmha.export.translation import Translation, TranslationError, Vocabulary

VOCABULARY = Vocabulary(enums={"Arch": ("gfx942", "gfx950")}, structs={"Row": {"rows": "int"}})
HEAD = "from __future__ import annotations\nfrom typing import NamedTuple\n"


def module_of(text: str, folder: Path) -> ModuleType:
    path = folder / "decisions.py"
    path.write_text(HEAD + text)
    spec = importlib.util.spec_from_file_location("decisions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def translated(text: str, folder: Path) -> str:
    return Translation([module_of(text, folder)], VOCABULARY).cpp


@pytest.mark.parametrize(
    ("python", "cpp"),
    [
        ("def f(a: int, b: int) -> int:\n    return -(-a // b)", "return -floor_div(-a, b);"),
        ("def f(a: int) -> int:\n    return -(-a)", "return -(-a);"),
        (
            "def f(a: int, b: int) -> float:\n    return a / b",
            "(static_cast<double>(a) / static_cast<double>(b))",
        ),
        ("def f(a: int, b: float) -> float:\n    return a * b", "(static_cast<double>(a) * b)"),
        (
            "def f(a: int) -> float:\n    return max(a, 0.5)",
            "std::max<double>({static_cast<double>(a), 0.5})",
        ),
        ("def f(x: Arch) -> bool:\n    return x == 'gfx950'", "x == Arch::gfx950"),
        ("K: dict[Arch, int] = {'gfx950': 5, 'gfx942': 4}", "kK[] = {std::int64_t{4}, std::int64"),
        (
            "class P(NamedTuple):\n a: int\n @classmethod\n def f(cls) -> P:\n  return cls(3)",
            "static P f(",
        ),
        ("_A, _B = 1, 2.0", "constexpr double kB = 2.0;"),
        (
            "class P(NamedTuple):\n    a: int\ndef f() -> int:\n    return P(3).a",
            "return P{std::int64_t{3}}.a;",
        ),
        (
            "def f(n: int) -> int:\n    s = 0\n    for i in range(n):\n     s += i\n    return s",
            "i < n; ++i) {\n    s = (s + i);",
        ),
        ("def f(a: int) -> bool:\n    return a <= 3", "return a <= std::int64_t{3};"),
        ("def f(r: Row) -> int:\n    return r.rows if not r.rows < 3 else 0", "(!(r.rows < std"),
        ("def f(a: int) -> int:\n    return a % 2", "return floor_mod(a, std::int64_t{2});"),
        ("def f(a: float) -> int:\n    return round(a)", "return rounded(a);"),
        ("def f(a: Sequence[float]) -> float:\n    return max(a)", "*std::max_element(a.begin(), "),
        (
            "def f(n: int) -> int:\n    a: list[int] = [i for i in range(n)]\n    return len(a)",
            "  for (std::int64_t i = 0; i < n; ++i) {\n    a.push_back(i",
        ),
        (
            "def f(r: Sequence[Row]) -> int:\n    for x in r:\n        return x.rows\n    return 0",
            "for (const auto& x : r) {",
        ),
        (
            "def f(n: int) -> int:\n    a: list[int] = [0] * n\n    a += [1] * n\n    return a[0]",
            "a.insert(a.end(), static_cast<std::size_t>(n), std::int64_t{1});",
        ),
    ],
)
def test_what_is_known(python, cpp, tmp_path):
    assert cpp in translated(python, tmp_path)


@pytest.mark.parametrize(
    ("python", "what"),
    [
        ("def f(a: int) -> int:\n    return a ** 2", "line 4: this operator"),
        ("def f(a: int) -> int:\n    return print(a)", "line 4: a call of print"),
        ("def f(a: int) -> int:\n    return b", "line 4: the name b"),
        ("def f(a: int) -> int:\n    return [a][0]", "line 4: this expression"),
        ("def f(a: int) -> int:\n    return 0.5", "line 4: a float in the place of a int"),
        ("def f(a: int) -> int:\n    a = 0.5\n    return a", "line 4: a float in the place"),
        ("def f(a: int) -> int:\n    return 1 if a else 0", "line 4: a int as a condition"),
        ("def f(a: int) -> bool:\n    return 0 < a < 3", "line 4: this comparison"),
        (
            "def f(a: int) -> int:\n    while a:\n        pass\n    return a",
            "line 4: this statement",
        ),
        ("def f(a: int) -> int:\n    for i in range(1, a):\n        pass", "line 4: a loop over"),
        ("def f(a: Sequence[int]) -> int:\n    a.append(1)\n    return 1", "line 4: a change of a"),
        ("def f(a: int) -> int:\n    b: int = a\n    return b", "line 4: an annotation of"),
        (
            "def f(a: Sequence[int]) -> int:\n    b: list[int] = a\n    return 1",
            "line 4: this list",
        ),
        ("def f(a: int):\n    return a", "line 3: a function without a type"),
        ("def f(a) -> int:\n    return a", "line 3: a without a type"),
        ("def f(a: int = 1) -> int:\n    return a", "line 3: arguments other than plain ones"),
        ("def f(x: Arch) -> bool:\n    return x == 'gfx90a'", "line 4: gfx90a, which is no Arch,"),
        ("def f(r: Row) -> int:\n    return r.columns", "line 4: columns of a Row"),
        ("K: dict[Arch, int] = {'gfx950': 5}", "line 3: K, which has no value for each Arch"),
        ("K = 'text'", "line 3: K, a str"),
        ("if True:\n    K = 1", "line 3: this statement"),
        (
            "def f(a: int) -> int:\n    if a > 1:\n        b = 2\n    return b",
            "line 6: the name b, which nothing before it defines,",
        ),
    ],
)
def test_what_is_not_known_is_refused(python, what, tmp_path):
    with pytest.raises(TranslationError, match=rf"^decisions\.py, {what}.* cannot be translated"):
        translated(python, tmp_path)


def test_the_policy_is_known():
    assert "quickest(const std::vector<Candidate>& candidates" in policy_in_cpp().cpp
