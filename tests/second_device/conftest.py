"""These tests need the second device, which `make test-second-device` builds and puts on their path."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    import torch

    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("second_device")
            if not hasattr(torch, "second"):
                item.add_marker(
                    pytest.mark.skip(reason="needs the second device: make test-second-device")
                )
