"""The convolutions of a model, forward and backward, as problems: to compile them before its first step, or to tune.

The model runs on tensors without values, and modules get back what they had, so nothing is computed and nothing
changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from leanconv.arrays import arrays_of
from leanconv.call.precompile import PrecompileResult, precompile
from leanconv.call.resolve import layer_problem
from leanconv.dtypes import DTYPES
from leanconv.options import FUNCTIONS, Layout, Precision
from leanconv.problem import ConvProblem
from leanconv.torch import deciding, epilogue, functions, layers, operators, patch
from leanconv.torch.module_state import State
from leanconv.torch.operators import CHANNELS_LAST
from leanconv.tuning import search
from leanconv.volumes.images import as_images


def warm_up(
    model: torch.nn.Module, example: Any, *, backward: bool | None = None, tune: bool = False, progress: bool = True
) -> PrecompileResult:
    """Compile the kernels of a model's convolutions, side by side on all cores, before the first step waits for them.

    Nothing is computed and nothing changes: the model runs on tensors without values, but for single numbers, such as
    counters, of which it gets copies. Its modules keep their parameters and buffers, and get back their attributes,
    lists and dictionaries; what hooks put elsewhere stays there. Of the convolutions that would run, those are
    compiled that `enable` patches, by the rules of the patch that is active or else of ``enable()``, and those of
    leanconv.torch's own modules and functions. Call it under the same autocast, and with the model in the same
    mode, as the steps. Where several processes train together, each calls it; none waits for another, since
    DistributedDataParallel and SyncBatchNorm are passed by.

    Args:
        model: on the GPU.
        example: what it is called with: a tensor, or a tuple of arguments; only shapes, dtypes, devices and memory
            order matter.
        backward: whether to compile for the backward pass too; None: if the model is in training mode.
        tune: whether to time first, on this GPU, what no table has: leanconv's candidates and PyTorch's own
            convolution, for every layer that `enable` could take. That takes about a second a layer, once; the times
            are kept in a table, as `leanconv.tune` does, and `enable` then takes what was quicker.
        progress: whether to show a progress bar; there is none where standard error is not a terminal.

    Returns:
        leanconv.PrecompileResult: how many kernels there are, how many of them were compiled, and how long it took.

    Raises:
        ValueError: the example has no tensor on a GPU; a module is a lazy one that has not been called; the model asks
            for values of tensors. What the model itself raises, and `leanconv.tune`.
    """
    index = next((index for each in _tensors(example) if (index := _index(each)) is not None), None)
    if index is None:
        raise ValueError("the example has no tensor on a GPU; kernels are compiled for GPUs only")
    if tune:
        for limit, problems in problems_of(model, example, backward=backward).items():
            search.tune(problems, device=f"cuda:{index}", workspace_limit=limit, peers=True, progress=progress)
    found = _by_limit(_record(_Recorder("fp32", index), model, example, backward)) or {None: []}
    done = [
        precompile(problems, device=f"cuda:{index}", workspace_limit=limit, progress=progress)
        for limit, problems in found.items()
    ]
    kernels, compiled = sum(each.kernels for each in done), sum(each.compiled for each in done)
    return PrecompileResult(sum(each.problems for each in done), kernels, compiled, sum(each.seconds for each in done))


def problems_of(
    model: torch.nn.Module, example: Any, *, backward: bool | None = None, precision: Precision = "fp32"
) -> dict[int | None, list[ConvProblem]]:
    """The different convolutions of a model, by the limit of workspace that `enable` gives them.

    The model may be on the CPU. Arguments are those of `warm_up`, and ``precision`` that of `enable`.
    """
    return _by_limit(_record(_Every(precision, None), model, example, backward))


def _by_limit(found: _Recorder) -> dict[int | None, list[ConvProblem]]:
    """The patched convolution allows gradients of filters a workspace, with which other kernels are chosen."""
    by_limit: dict[int | None, list[ConvProblem]] = {}
    for problem in dict.fromkeys(found.patched):
        by_limit.setdefault(patch.workspace(problem), []).append(problem)
    for problem in dict.fromkeys(found.problems):
        by_limit.setdefault(None, []).append(problem)
    return by_limit


def example_of(shapes: Sequence[tuple[int, ...]], model: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Tensors of these shapes, of the type and in the memory order of the model's parameters."""
    first = next(model.parameters(), torch.empty(0))
    last = any(
        p.dim() in CHANNELS_LAST and p.is_contiguous(memory_format=CHANNELS_LAST[p.dim()]) and not p.is_contiguous()
        for p in model.parameters()
    )
    made = (torch.empty(shape, dtype=first.dtype, device=first.device) for shape in shapes)
    return tuple(
        each.contiguous(memory_format=CHANNELS_LAST[each.dim()]) if last and each.dim() in CHANNELS_LAST else each
        for each in made
    )


def _tensors(nested: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(nested)[0] if isinstance(each, torch.Tensor)]


def _index(tensor: torch.Tensor) -> int | None:
    arrays = arrays_of(tensor)
    assert arrays is not None
    return arrays.device(tensor)


#: leanconv's own operators, by what a mode is given
_OURS = {getattr(torch.ops.leanconv, name).default: name for name in operators.NAMES}
_FUSED = {operator: f"conv{axes}d" for axes, operator in epilogue.OPERATORS.items()}


class _Recorder(TorchDispatchMode):
    """The problems of the convolutions that a model calls, by the patch that is active or else one of ``precision``."""

    def __init__(self, precision: Precision, index: int | None) -> None:
        super().__init__()
        self._active, self._index = deciding.current() or patch.Patch(None, None, None, precision), index
        #: of `leanconv.torch`'s own operators, and of layers whose convolution is patched
        self.problems: list[ConvProblem] = []
        self.patched: list[ConvProblem] = []
        #: whether the model runs backward too
        self.backward = False
        #: what makes tensors without values
        self.fake: Any = None
        #: by identity, tensors that have values, and what stands for each
        self._stand_ins: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        aten, ours = torch.ops.aten, _OURS.get(function)
        if str(function).startswith(("aten.conv", "aten._conv")) and function is not aten.convolution.default:
            # in inference mode aten.conv2d arrives, and the convolution that it is made of does not
            with self:
                made = function.decompose(*given, **(options or {}))
            if made is not NotImplemented:
                return made
        if function is aten.convolution.default:
            x, w, bias, *rest = given
            self._layer(x, w, bias is not None, rest, (True, False, False))
        elif function is aten.convolution_backward.default:
            _, x, w, _, *rest, mask = given
            self._layer(x, w, False, rest, (False, *mask[:2]))
        elif ours is not None and FUNCTIONS[ours].op == "fprop":
            self._ours(ours, given[0].shape, given[1].shape, given[0], *given[2:])
        elif ours is not None and FUNCTIONS[ours].op == "dgrad":
            self._ours(ours, given[3], given[1].shape, given[0], *given[2:3], *given[4:])
        elif ours is not None:
            self._ours(ours, given[0].shape, given[2], given[0], None, *given[3:])
        elif function in _FUSED:
            x, w, bias, scale, add, activation, *rest = given
            beside = {"scale": scale is not None, "add": add is not None, "activation": activation}
            self._ours(_FUSED[function], x.shape, w.shape, x, bias, *rest, **beside)
        # NOTE: of tensors with values alone PyTorch computes some things, in place too
        given, options = tree_map(self._without_values, (given, options or {}))
        return function(*given, **options)

    def _without_values(self, given: Any) -> Any:
        """What stands for a tensor that has values: one without, or a copy of a single number, which models read."""
        if not isinstance(given, torch.Tensor) or isinstance(given, FakeTensor):
            return given
        at = id(given)
        if at not in self._stand_ins:
            if given.numel() == 1 and type(given) in functions.KINDS and given.device.type in ("cpu", "cuda"):
                with unset_fake_temporarily():
                    copied = given.detach().clone()
                made = self.fake.fake_tensor_converter.from_real_tensor(self.fake, copied, make_constant=True)
            else:
                made = self.fake.from_tensor(given)
            self._stand_ins[at] = given, made
        return self._stand_ins[at][1]

    def _layer(self, x: Any, w: Any, bias: bool, rest: Any, wanted: Sequence[bool]) -> None:
        options = layers.options_of(rest, x.dim() - 2)
        if layers.why_never(x, w, options):
            return
        for operation, is_wanted in zip(layers.operations(x, w, options, bias), wanted, strict=True):
            if is_wanted:
                problem = self._active.problem(operation, options, x.dtype)
                if self._belongs(w, problem):
                    self.patched.append(problem)

    def _belongs(self, w: Any, problem: ConvProblem) -> bool:
        decision = self._active.decide(w, problem, self._index)
        return bool(decision.name or (decision.eager and not self.backward))

    def _ours(self, name: str, x_shape: Any, w_shape: Any, first: Any, bias: Any, *options: Any, **beside: Any) -> None:
        layout: Layout = "NHWC" if operators.is_channels_last(first) else "NCHW"
        dtype = DTYPES[str(first.dtype).removeprefix("torch.")].name
        bias_shape = None if bias is None else tuple(bias.shape)
        requested = operators.requested_of(name, None, *options).of(FUNCTIONS[name].op)
        problem = layer_problem(requested, tuple(x_shape), tuple(w_shape), bias_shape, dtype, layout)
        self.problems.append(as_images(replace(problem, **beside)))


class _Every(_Recorder):
    """Also what `enable` would leave to PyTorch, on any device."""

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        result = super().__torch_dispatch__(function, types, given, options)
        if function is torch.ops.aten.convolution.default and result.dim() > 3:
            # as on CUDA: the CPU's convolution may lay its result out otherwise
            last = layers.is_channels_last(given[0], given[1])
            result = result.contiguous(memory_format=CHANNELS_LAST[result.dim()] if last else torch.contiguous_format)
        return result

    def _belongs(self, w: Any, problem: ConvProblem) -> bool:
        return True


def _record(found: _Recorder, model: torch.nn.Module, example: Any, backward: bool | None) -> _Recorder:
    """Run a model on tensors without values under ``found``."""
    layers.check_model(model)
    lazy = [name or type(each).__name__ for name, each in model.named_modules() if _is_lazy(each)]
    if lazy:
        raise ValueError(
            f"{lazy[0]} is a lazy module, whose parameters have no sizes yet: call the model once before this"
        )
    given = example if isinstance(example, tuple) else (example,)
    found.backward = model.training if backward is None else backward
    try:
        with _no_autocast_cache(), _unchanged(model), FakeTensorMode(allow_non_fake_inputs=True) as found.fake, found:
            inputs = [_stand_in(found.fake, each) if isinstance(each, torch.Tensor) else each for each in given]
            with _alone(model) as local:
                outputs = local(*inputs)
            if found.backward:
                _differentiate(model, outputs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"the model asks for values of tensors ({error.func}), and to find its convolutions it runs on tensors "
            "without values; give a part of the model that asks for none, or leave this out: the first calls of the "
            "model compile what they need"
        ) from error
    return found


def _is_lazy(module: torch.nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(each is not None and is_lazy(each) for each in own)


@contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Give the modules back what they had."""
    state = State(model)
    try:
        yield
    finally:
        state.restore()


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Autocast keeps the filters that it has cast for later calls; it must not keep those without values."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _alone(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The model of this process: what would communicate with other processes must not, since tensors have no values."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    shared = [each for each in model.modules() if isinstance(each, torch.nn.SyncBatchNorm)]
    for each in shared:
        each.forward = partial(torch.nn.BatchNorm2d.forward, each)  # type: ignore[method-assign]
    try:
        yield model
    finally:
        for each in shared:
            del each.forward


def _stand_in(fake: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    made = fake.from_tensor(tensor.detach())
    return made.requires_grad_() if tensor.requires_grad else made


def _differentiate(model: torch.nn.Module, outputs: Any) -> None:
    """Run backward, and leave no gradient behind."""
    results = [each for each in _tensors(outputs) if each.requires_grad]
    wanted = [each for each in model.parameters() if each.requires_grad]
    if results and wanted:
        torch.autograd.grad(results, wanted, [torch.empty_like(each) for each in results], allow_unused=True)
