"""Real GPUs. Where there is none, every test here is skipped, and the run's summary says so."""

import pytest
import torch

from jitfmha.call.detection import target_of


@pytest.fixture(scope="session", autouse=True)
def gpus() -> list[torch.device]:
    """Those that jitfmha serves; skips the test where there are none."""
    if not torch.cuda.is_available():
        pytest.skip(f"nothing was tried on a GPU: torch {torch.__version__} sees none")
    served, reasons = [], []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        try:
            target_of(device)
        except ValueError as error:
            reasons.append(str(error))
        else:
            served.append(device)
    if not served:
        pytest.skip(f"nothing was tried on a GPU: {'; '.join(reasons)}")
    return served


@pytest.fixture
def gpu(gpus: list[torch.device]) -> torch.device:
    """The first of them."""
    return gpus[0]


@pytest.fixture
def two_gpus(gpus: list[torch.device]) -> tuple[torch.device, torch.device]:
    if len(gpus) < 2:
        pytest.skip("nothing was tried on two GPUs: there is one")
    return gpus[0], gpus[1]


@pytest.fixture
def arch(gpu: torch.device) -> str:
    target = target_of(gpu)
    return target.arch
