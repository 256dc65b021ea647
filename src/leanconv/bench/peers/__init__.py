"""Whom leanconv is measured against, and itself: one file for each library."""

from leanconv.bench.peers.base import Candidate, Peer, Unable
from leanconv.bench.peers.cudnn import CudnnPeer
from leanconv.bench.peers.images import CupyPeer, OpencvPeer, ScipyPeer
from leanconv.bench.peers.npp import NppPeer
from leanconv.bench.peers.own import LeanconvPeer
from leanconv.bench.peers.torch_peer import Im2colPeer, TorchCpuPeer, TorchPeer

#: Everything that can be timed, in the order of the tables.
PEERS: tuple[Peer, ...] = (
    LeanconvPeer(),
    TorchPeer(),
    CudnnPeer(),
    Im2colPeer(),
    NppPeer(),
    CupyPeer(),
    TorchCpuPeer(),
    OpencvPeer(),
    ScipyPeer(),
)

__all__ = ["PEERS", "Candidate", "LeanconvPeer", "Peer", "Unable"]
