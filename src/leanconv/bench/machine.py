"""Which machine, which versions, which revision: what a figure must carry to mean anything later."""

from __future__ import annotations

import platform
import re
import subprocess
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from leanconv.bench.ceilings import Ceilings
from leanconv.bench.provenance import provenance
from leanconv.runtime.cache import INSTALL_COMPILER
from leanconv.runtime.launch import why_no_gpu
from leanconv.runtime.threads import cores


def gpu_usable() -> tuple[bool, str]:
    """Whether the benchmark can use a GPU here, and the sentence that says why not."""
    from leanconv.bench.peers.base import missing_cuda_torch, missing_module

    if missing := missing_cuda_torch():
        advice = ": pip install 'leanconv[torch]'" if missing_module("torch") else ""
        return False, f"no GPU is measured: the benchmark holds GPU arrays in PyTorch, and {missing}{advice}"
    if missing := why_no_gpu():
        return False, f"no GPU is measured: {missing}"
    if missing := missing_module("cuda.core"):
        return False, f"no GPU is measured: kernels are compiled with cuda-core, and {missing}: {INSTALL_COMPILER}"
    return True, ""


def describe(
    gpu: bool, ceilings: Ceilings | None, versions: dict[str, str], given_revision: str | None
) -> dict[str, Any]:
    """The ``machine`` record of a results file. Raises ValueError as `provenance` does."""
    record: dict[str, Any] = {
        "gpu": None,
        "cpu": _cpu_name(),
        "cores": cores(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "leanconv": installed_version("leanconv") or "not installed (run from its source)",
        **provenance(given_revision, gpu),
        **versions,
    }
    if ceilings:
        record["ceilings"] = asdict(ceilings)
    if gpu:
        record |= _gpu_record()
    return record


def _gpu_record() -> dict[str, Any]:
    import torch
    from cuda.bindings import nvrtc

    about = torch.cuda.get_device_properties(0)
    _, major, minor = nvrtc.nvrtcVersion()
    return {
        "gpu": about.name,
        "multiprocessors": about.multi_processor_count,
        "l2_bytes": about.L2_cache_size,
        "memory_bytes": about.total_memory,
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
        "nvrtc": f"{major}.{minor}",
    }


def _driver_version() -> str | None:
    """The installed driver's own version, such as 580.159.04."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    except OSError:
        try:
            query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
            text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return None
    match = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return match[0] if match else None


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def slug(record: dict[str, Any]) -> str:
    """A folder name for the machine: its GPU's, or ``cpu``."""
    gpu = record.get("gpu")
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") if gpu else "cpu"
