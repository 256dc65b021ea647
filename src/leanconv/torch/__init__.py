"""leanconv for PyTorch: functions and modules with gradients; `enable` patches the convolutions of whole models."""

# Which file has what:
# - Functions and modules with gradients: `functional`, `modules`, `causal`, `images`. Their operators in PyTorch's
#   library: `operators`, `epilogue`, with `vmap`.
# - `enable`, in the order in which a call meets it: `switch` turns it on. `module_call` and `functions` take the place
#   of PyTorch's modules and functions. `decided` keeps what was decided for a layer, `quick` computes a call that is as
#   the one before, `recorded` one with a gradient. Others meet `patch` below PyTorch's dispatcher (`registration`).
# - How it decides: `deciding` says what a decision is, `layers` what a layer is, `comparing` who is quicker, by
#   `expected_time` or `measured_time`. `packed` keeps packed filters, `switches` asks what PyTorch is set to, `report`
#   says what ran.
# - Before the first call, to compile or tune: `recording`. `module_state` gives a model back what it had before.
# - `fuse` and the backend of torch.compile: `fusing`, `fused_backend`, `compile_report`. How `fuse` follows a model:
#   `fused_trace`, with `fused_kinds` and `in_place`, or part by part, `fused_part`. What both look for:
#   `patterns`, `squeeze_graph`; what computes it: `fused_layer`, `squeeze`.

from leanconv.torch.causal import CausalConv3d
from leanconv.torch.compile_report import CompileReport, fused_report
from leanconv.torch.functional import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from leanconv.torch.fused_backend import fused
from leanconv.torch.fusing import FuseReport, fuse
from leanconv.torch.images import filter2d
from leanconv.torch.modules import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from leanconv.torch.patch import Patch
from leanconv.torch.recording import warm_up
from leanconv.torch.report import Report
from leanconv.torch.switch import disable, enable, report

__all__ = [
    "CausalConv3d",
    "CompileReport",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "FuseReport",
    "Patch",
    "Report",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "disable",
    "enable",
    "filter2d",
    "fuse",
    "fused",
    "fused_report",
    "report",
    "warm_up",
]


def __getattr__(name: str) -> object:
    if name == "Takeover":
        raise AttributeError("leanconv.torch.Takeover is now leanconv.torch.Patch")
    raise AttributeError(f"module 'leanconv.torch' has no attribute {name!r}")
