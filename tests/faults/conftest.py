"""What fault tests use."""

from tests.harness.fixtures import make_job, simulated_model

__all__ = ["make_job", "simulated_model"]
