"""What earlier versions of PyTorch do not do yet: tests of it are skipped there."""

from __future__ import annotations

import pytest
import torch


def before(version: str) -> bool:
    """Whether this PyTorch is older, such as ``before("2.10")``."""
    mine, other = ([int(part) for part in each.split(".")[:2]] for each in (torch.__version__, version))
    return mine < other


def since(version: str, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(before(version), reason=f"before PyTorch {version} {reason}")
