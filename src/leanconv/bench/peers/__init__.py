"""Whom leanconv is measured against, and itself: one file for each library."""

from leanconv.bench.peers.base import Candidate, Peer, Unable
from leanconv.bench.peers.cudnn import CudnnPeer
from leanconv.bench.peers.cudnn_graph import CudnnGraphPeer
from leanconv.bench.peers.cutlass import CutlassPeer
from leanconv.bench.peers.cvcuda import CvcudaPeer
from leanconv.bench.peers.images import CucimPeer, CupyPeer, OpencvPeer, ScipyPeer
from leanconv.bench.peers.npp import NppPeer
from leanconv.bench.peers.others import CausalPeer, CompilePeer, FourierPeer, UnmeasuredPeer
from leanconv.bench.peers.own import LeanconvPeer
from leanconv.bench.peers.torch_peer import Im2colPeer, TorchCpuPeer, TorchPeer

#: Everything that can be timed, in the order of the tables.
PEERS: tuple[Peer, ...] = (
    LeanconvPeer(),
    TorchPeer(),
    CudnnPeer(),
    CudnnGraphPeer(),
    CompilePeer(),
    FourierPeer(),
    CausalPeer(),
    CutlassPeer(),
    UnmeasuredPeer(
        "tensorrt",
        "nothing here builds its engines: on PyPI its libraries for CUDA 13 (tensorrt-cu13-libs 11.4.0.106) are 15 kB "
        "that download them from NVIDIA's own index at installation, and the machines that measure have no network",
    ),
    Im2colPeer(),
    NppPeer(),
    CvcudaPeer(),
    CupyPeer(),
    CucimPeer(),
    TorchCpuPeer(),
    OpencvPeer(),
    ScipyPeer(),
)

__all__ = ["PEERS", "Candidate", "LeanconvPeer", "Peer", "Unable"]
