import pytest
import torch
from hypothesis import settings

# The tensors of the tests are tiny; threads would only wait for each other.
torch.set_num_threads(1)

# Deadlines measure the machine, not the code.
settings.register_profile("kfc", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("kfc")


@pytest.fixture(autouse=True)
def _fresh_random_state() -> None:
    torch.manual_seed(0)


@pytest.fixture
def double():
    """Make float64 the default dtype in the test."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def asynchronous(monkeypatch):
    """Treat the CPU as a device that the host does not wait for if it need not."""
    for module in ("kfc.optimizers.engine", "kfc.fisher.loss"):
        monkeypatch.setattr(f"{module}.is_asynchronous", lambda device: True)
