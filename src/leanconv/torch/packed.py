"""What `enable` keeps of a layer's parameters between two of their changes: packed filters, and casts for autocast."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from leanconv.arrays import arrays_of
from leanconv.call.weights import PreparedWeights
from leanconv.options import Kept
from leanconv.runtime import launch


class Reads(Protocol):
    """A layer that reads kept filters: see `leanconv.torch.decided.Layer`."""

    packed: Any
    quick: Any


def signature(tensor: Any) -> tuple[Any, ...]:
    """What a ready call depends on in filters and biases, and whether their memory is the same as before."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg()


def lowered(tensor: Any, dtype: Any) -> Any:
    """A tensor, or None, in the type of autocast; as it is where that is None, autocast being off."""
    return tensor if tensor is None or dtype is None or tensor.dtype is dtype else tensor.to(dtype)


def source_of(w: Any) -> Any:
    """The parameter that autocast has cast to filters, whose copy knows it where gradients are recorded; or these."""
    return w if w.grad_fn is None else getattr(w.grad_fn.next_functions[0][0], "variable", w)


class PackedFilters:
    """Filters that are packed from the second call on between two of their changes."""

    def __init__(self, weight: Any, axes: int, kept: Kept = "same bits") -> None:
        # shares memory and the count of changes with the filters; so no other memory has their address meanwhile
        self._weights = _prepared(weight.detach(), axes, kept)
        self.signature: tuple[Any, ...] = signature(weight)
        #: how often the parameters had changed at the call before
        self.version: Any = -1
        #: which read them
        self.layers: list[Reads] = []

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that are kept beside the parameters."""
        return self._weights.nbytes

    @property
    def needed(self) -> int:
        """Bytes that `current` will keep, besides what calls pack."""
        return 0

    def current(self, weight: Any, bias: Any, version: Any) -> tuple[PreparedWeights, Any] | None:
        """Filters and bias for a ready call; None where it must take the parameters themselves.

        ``version`` says how often these have changed.
        """
        return self._weights, bias

    @property
    def weights(self) -> PreparedWeights:
        """The filters, with what is kept of them."""
        return self._weights

    def refresh(self) -> None:
        """Drop what is kept."""
        self._weights.refresh()
        self.version = -1

    def release(self) -> None:
        """Let their layers keep them, and the memory of the filters, no longer."""
        for layer in self.layers:
            layer.packed = layer.quick = None
        self.layers.clear()


@dataclass(frozen=True)
class _Cast:
    weights: PreparedWeights
    bias: Any
    #: of the parameters that have been cast; the bias itself
    version: Any
    bias_ref: Any
    #: the tensors that are copies
    own: list[Any]
    #: the stream that has cast them, and all that may read them
    stream: int
    streams: set[int]
    #: addresses of both
    w_at: int
    bias_at: int
    #: the memory of the parameters, so that no other has its address meanwhile; and where it begins
    sources: tuple[Any, ...]
    reads: tuple[int, ...]


class CastFilters(PackedFilters):
    """Filters and a bias that are kept in the type of autocast, from the second call on between two of their changes.

    Autocast itself keeps them for the length of its context.
    """

    def __init__(self, weight: Any, bias: Any, axes: int, dtype: Any) -> None:
        self._axes, self._dtype = axes, dtype
        self.signature = signature_of(weight, bias, dtype)
        self.version, self.layers = -1, []
        # a parameter may be freed, and end its cast, while the same thread makes one
        self._lock = threading.RLock()
        self._cast: _Cast | None = None
        each = [weight] if bias is None else [weight, bias]
        self._bytes = sum(one.numel() * dtype.itemsize for one in each if one.dtype is not dtype)
        arrays = arrays_of(weight)
        assert arrays is not None
        self._arrays, self._index = arrays, arrays.device(weight) or 0
        arrays.follow(self)
        self._stream = arrays.fast_stream(self._index)

    @property
    def nbytes(self) -> int:
        cast = self._cast
        return 0 if cast is None else self._bytes + cast.weights.nbytes

    @property
    def needed(self) -> int:
        return self._bytes if self._cast is None else 0

    def reads(self) -> tuple[int, ...]:
        """Addresses where the memory of the parameters begins whose casts are kept."""
        cast = self._cast
        return () if cast is None else cast.reads

    def current(self, weight: Any, bias: Any, version: Any) -> tuple[PreparedWeights, Any] | None:
        stream = self._stream()
        cast = self._cast
        if cast is None or cast.version != version or cast.bias_ref() is not bias:
            with self._lock:
                cast = self._cast = self._make(weight, bias, version, stream)
        if stream not in cast.streams and not self._share(cast, stream):
            return None
        return cast.weights, cast.bias

    def kept_for(self, version: Any, bias: Any, stream: int) -> _Cast | None:
        """What is kept of parameters that have changed ``version`` times, if a stream may read it at once.

        The caller holds it until its launch: freed earlier, its memory could be reused.
        """
        cast = self._cast
        fits = cast is not None and cast.version == version and cast.bias_ref() is bias and stream in cast.streams
        return cast if fits else None

    def _make(self, weight: Any, bias: Any, version: Any, stream: int) -> _Cast:
        w, added = weight.detach(), None if bias is None else bias.detach()
        tensors = [lowered(each, self._dtype) for each in (w, added)]
        own = [made for made, of in zip(tensors, (w, added), strict=True) if made is not of]
        weights = _prepared(tensors[0], self._axes)
        w_at, bias_at = (0 if each is None else each.data_ptr() for each in tensors)
        sources = tuple(each for each in (w, added) if each is not None)
        reads = tuple(self._arrays.memory(each) for each in sources)
        return _Cast(weights, tensors[1], version, self._of(bias), own, stream, {stream}, w_at, bias_at, sources, reads)

    def _of(self, bias: Any) -> Callable[[], Any]:
        """A weak reference to the bias, with which its cast is freed."""
        if bias is None:
            return _nothing
        mine = weakref.ref(self)

        def free(_: Any) -> None:
            kept = mine()
            if kept is not None:
                kept.refresh()

        return weakref.ref(bias, free)

    def _share(self, cast: _Cast, stream: int) -> bool:
        """Let another stream read a cast once it has been made; the stream that has made it never waits."""
        device = launch.open_device(self._index)
        if device.capturing(cast.stream):
            return False
        device.wait(cast.stream)
        for each in cast.own:
            self._arrays.in_use(each, self._index)
        cast.streams.add(stream)
        return True

    def refresh(self) -> None:
        with self._lock:
            self._cast = None
        self.version = -1


def _nothing() -> None:
    """No bias."""


def memory_of(x: Any, w: Any, bias: Any) -> tuple[Any, ...]:
    """What a ready call depends on besides sizes and strides: alignment of the images, addresses of the parameters."""
    return x.data_ptr() & 15, w.data_ptr(), None if bias is None else bias.data_ptr()


def signature_of(weight: Any, bias: Any, dtype: Any) -> tuple[Any, ...]:
    """What must stay the same of the parameters whose filters are kept: of the bias only what is cast."""
    if dtype is None:
        return signature(weight)
    return signature(weight), None if bias is None else signature(bias)


def version_of(weight: Any, bias: Any, dtype: Any) -> Any:
    """How often that has changed of which something is kept."""
    return weight._version if dtype is None or bias is None else (weight._version, bias._version)


def _prepared(weight: Any, axes: int, kept: Kept = "same bits") -> PreparedWeights:
    """Filters as `prepare_weights` makes them. By default calls with them give the bits of calls without."""
    return PreparedWeights(weight.unsqueeze(-2) if axes == 1 else weight, kept)
