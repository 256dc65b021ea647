"""The patched convolution of unchanged models: another kernel for aten::convolution and its backward on CUDA.

PyTorch's dispatcher finds the kernels of an operator by the device of its tensors. From the first `enable` on, ours
are registered there, below autograd, so autograd, autocast, torch.compile and CUDA graphs work as before. What the
active `Patch` leaves to PyTorch goes to what the kernel that every device shares (CompositeExplicitAutograd), the
one that is found without us, would do. `functions` decides before the dispatcher where that is all there is to know.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from marshal import dumps
from types import TracebackType
from typing import Any

import torch

from leanconv.arrays import arrays_of
from leanconv.call import bind
from leanconv.call.choose import NoAlgorithmError
from leanconv.call.gpu_call import GpuCall
from leanconv.call.resolve import layer_problem, of_problem
from leanconv.dtypes import DTYPES
from leanconv.options import PRECISIONS, Precision, layer_options, limit_of, one_of, yes_or_no
from leanconv.problem import ConvProblem
from leanconv.runtime.bounded_cache import BoundedCache
from leanconv.runtime.compile import CompileError
from leanconv.runtime.driver import CudaUnavailableError
from leanconv.torch import decided, quick, registration, switches
from leanconv.torch.comparing import compared
from leanconv.torch.deciding import Choice, Decision, left_of
from leanconv.torch.expected_time import CYCLES_PER_US, pytorch_cycles, worth_recording
from leanconv.torch.layers import (
    FUNCTION_OF,
    Operation,
    Options,
    Selection,
    Weights,
    operations,
    options_of,
    selected,
    stricter,
    tf32_allowed,
    weights_of,
    why_never,
    with_rows,
)
from leanconv.torch.packed import source_of
from leanconv.torch.recorded import Gradients
from leanconv.torch.report import Line, Report

#: The last version of the format in which equal values of equal types have equal bytes, whatever objects they share.
MARSHAL_VERSION = 2
#: Bytes that a gradient of filters may take while it runs, where LEANCONV_WORKSPACE_LIMIT says nothing.
#: Explored (H200, 4d8021d): with them it is 1.3 times as fast on suite opencnn in NHWC.
_WEIGHT_WORKSPACE = 32 << 20
#: of a report; a model whose images have ever new sizes has ever new lines
_MOST_LINES = 10_000


class Patch:
    """What `enable` returns: switched on; a context manager, and `disable` to switch it off."""

    def __init__(
        self,
        model: torch.nn.Module | None,
        include: Selection,
        exclude: Selection,
        precision: Precision,
        batch_invariant: bool = False,
    ) -> None:
        one_of("precision", precision, PRECISIONS)
        self._precision, self._batch_invariant = precision, yes_or_no("batch_invariant", batch_invariant)
        # they are kept, also where the model gets others: so an id is one of theirs as long as this object lives
        self._weights = [] if model is None else [(name, each) for name, each in weights_of(model) if each is not None]
        self._names = {id(each): name for name, each in self._weights}
        self._include, self._exclude = selected(include, "include", model), selected(exclude, "exclude", model)
        self._known = {*self._names}
        for chosen in (self._include, self._exclude):
            if isinstance(chosen, Weights):
                self._known |= chosen.ids
        self._choices: BoundedCache[Any, tuple[Choice, ...]] = BoundedCache(4096)
        #: what `left_recorded` has found; an empty tuple where something is taken
        self._recorded: BoundedCache[Any, tuple[Line, ...]] = BoundedCache(4096)
        self._lines: dict[Any, Line] = {}
        #: those that torch.nn.functional has decided before PyTorch's dispatcher
        self.layers = decided.Layers(self)

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()

    def disable(self) -> None:
        """Switch it off: PyTorch computes as before. A second time does nothing."""
        registration.remove(self)
        self._forget()

    def _forget(self) -> None:
        """Keep the report alone: neither filters nor any ready call."""
        self.choose_anew()
        self._weights = []
        self._include = self._exclude = _nothing  # for a call of another thread that is under way
        self._names, self._known = {}, set()

    def choose_anew(self) -> None:
        """Drop every choice, and what is packed."""
        self._choices.clear()
        self._recorded.clear()
        self.layers.clear()

    def decide_recorded_anew(self) -> None:
        """Drop what was decided of layers whose gradients are recorded: others count these from now on."""
        self._recorded.clear()
        self.layers.decide_anew()

    def refresh(self) -> None:
        """Drop packed filters, after parameters have changed unseen: through ``.data``, by a collective of
        torch.distributed, or by a CUDA graph's replay."""
        self.layers.refresh()

    def report(self) -> Report:
        """What ran so far, layer by layer."""
        return Report(tuple(line for line in self._lines.values() if line.calls), self.layers.packed_bytes)

    # Below autograd

    def convolution(self, x: Any, w: Any, bias: Any, *given: Any) -> Any:
        """aten::convolution."""
        choice = self.choice(x, w, bias, given)
        next(choice.line.ticks)
        if choice.call is None:
            return switches.left_to_pytorch(x, w, bias, given, tf32_allowed())
        return choice.call(x, w, bias)

    def choice(self, x: Any, w: Any, bias: Any, given: Any, weight: Any = None, outside: bool = False) -> Choice:
        """What is decided for aten::convolution of these tensors; ``given`` are its other arguments.

        ``weight`` is what ``w`` has been cast from, if it has. ``outside``: of CUDA graphs, without a gradient.
        """
        weight = w if weight is None else weight
        key = self._key(x, w, bias, (given, outside), weight)
        choices = None if key is None else self._choices.get(key) or self._choices.recall(key)
        if choices is None:
            choices = (self._choose_forward(x, w, bias, options_of(given, x.dim() - 2), weight, outside),)
            if choices[0].captured is not None:
                # NOTE: in the first call of a kind PyTorch searches among cuDNN's plans, which it cannot while a CUDA
                # graph is captured; so that call is not left to the capture
                with torch.no_grad():
                    switches.left_to_pytorch(x, w, bias, given, tf32_allowed())
            if key is not None:
                self._choices.keep(key, choices)
        return choices[0]

    def left_recorded(
        self, x: Any, w: Any, bias: Any, given: Any, mask: Any, weight: Any, captured: bool = False
    ) -> tuple[Line, ...] | None:
        """The lines of a layer and of the gradients that ``mask`` wants, if PyTorch computes all of them; else None.
        Where gradients come to `backward`, which counts them, the line of the layer alone.

        It does where leanconv takes none, or saves less than it takes to record a gradient in Python, which a CUDA
        graph that has ``captured`` the step does not do.
        """
        key = self._key(x, w, bias, (given, mask, captured), weight)
        lines = None if key is None else self._recorded.get(key) or self._recorded.recall(key)
        if lines is None:
            lines = self._left_recorded(x, w, bias, given, mask, weight, captured) or ()
            if key is not None:
                self._recorded.keep(key, lines)
        return lines or None

    def _left_recorded(
        self, x: Any, w: Any, bias: Any, given: Any, mask: Any, weight: Any, captured: bool
    ) -> tuple[Line, ...] | None:
        options, arrays = options_of(given, x.dim() - 2), arrays_of(x)
        never = why_never(x, w, options)
        index = None if arrays is None else arrays.device(x)
        decided: list[tuple[str, str, Decision]] = []
        for op, wanted in zip(operations(x, w, options, bias is not None), (True, *mask), strict=True):
            what, decision = f"{tuple(x.shape)} by {tuple(w.shape)}", Decision("", never)
            if wanted and not never:
                try:
                    problem = self.problem(op, options, x.dtype)
                    what, decision = str(problem), self.decide(weight, problem, index)
                except (ValueError, TypeError) as error:
                    decision = Decision("", str(error))
                except (CudaUnavailableError, CompileError):  # which the call itself tells
                    return None
            if wanted:
                decided.append((op.when, what, decision))
        taken = [decision for *_, decision in decided if decision.name]
        saved = sum(each.pytorch - each.ours for each in taken)
        always = self._batch_invariant or captured
        if taken and (always or worth_recording(saved, sum(each.pytorch for *_, each in decided))):
            return None
        little = f"leanconv saves {saved / CYCLES_PER_US:.0f} µs, too little for a gradient that Python records"
        lines = tuple(
            self._leave(weight, at, what, little if each.name else each.why).line for at, what, each in decided
        )
        return lines[:1] if registration.asked_for_gradients() else lines

    def backward(self, grad: Any, x: Any, w: Any, bias_sizes: Any, *given: Any) -> Any:
        """aten::convolution_backward."""
        *most, mask = given
        choices = by_x, by_w = self._gradients(grad, x, w, given)
        if switches.capturing():
            self.layers.trained_by_graph(source_of(w))
        else:
            self.layers.trained(w)
        for wanted, by in zip(mask, choices, strict=False):
            if wanted:
                next(by.line.ticks)
        left = left_of(choices, mask)
        dx = dw = db = None
        if any(left):
            dx, dw, db = registration.original_backward(grad, x, w, bias_sizes, *most, left)
        elif mask[2]:
            db = grad.sum((0, *range(2, grad.dim())))
        if mask[0] and by_x.call is not None:
            dx = by_x.call(grad, w, x)
        if mask[1] and by_w.call is not None:
            dw = by_w.call(grad, w, x)
        return dx, dw, db

    def quick_gradients(self, grad: Any, x: Any, w: Any, given: Any, mask: Any) -> Gradients | None:
        """What computes the gradients of calls like this one of `backward` soonest; None where that is the long way."""
        choices = self._gradients(grad, x, w, (*given, mask))
        return quick.gradients(self, choices, (grad, x, w), given, tuple(mask), registration.original_backward)

    def _gradients(self, grad: Any, x: Any, w: Any, given: Any) -> tuple[Choice, ...]:
        """What is decided for both gradients of these tensors; ``given`` are other arguments and the mask."""
        key = self._key(x, w, grad, given)
        choices = None if key is None else self._choices.get(key) or self._choices.recall(key)
        if choices is None:
            *most, mask = given
            choices = self._choose_backward(grad, x, w, options_of(most, x.dim() - 2), mask)
            if key is not None:
                self._choices.keep(key, choices)
        return choices

    def _key(self, x: Any, w: Any, third: Any, given: Any, weight: Any = None) -> Any:
        """What a choice depends on; None for tensors that are not for us."""
        try:
            identity = self._identity(w if weight is None else weight) if self._known else None
            return (
                _signature(x), _signature(w), None if third is None else _signature(third),
                identity, tf32_allowed(), dumps(given, MARSHAL_VERSION),
            )  # fmt: skip
        except (AttributeError, RuntimeError, ValueError):
            return None

    def _identity(self, w: Any) -> int | None:
        """The id of the filters among those that have a name or are selected; None for others."""
        at = id(w if id(w) in self._known else source_of(w))
        return at if at in self._known else None

    # What is decided, once for each kind of call

    def _choose_forward(self, x: Any, w: Any, bias: Any, options: Options, weight: Any, outside: bool) -> Choice:
        why = why_never(x, w, options) or (why_never(bias, w, options, axes=(1,)) if bias is not None else "")
        if why:
            return self._leave(weight, "forward", f"{tuple(x.shape)} by {tuple(w.shape)}", why)
        filters = w.shape[1] * options.groups if options.transposed else w.shape[0]
        if bias is not None and bias.shape[0] != filters:  # which PyTorch refuses
            what = f"{tuple(x.shape)} by {tuple(w.shape)}"
            return self._leave(weight, "forward", what, f"its bias has {bias.shape[0]} elements")
        return self._choose(weight, operations(x, w, options, bias is not None)[0], options, x, w, bias, outside)

    def _choose_backward(self, grad: Any, x: Any, w: Any, options: Options, mask: Any) -> tuple[Choice, Choice]:
        _, by_input, by_filters = operations(x, w, options)
        why = why_never(x, w, options) or why_never(grad, w, options)
        if why:
            what = f"{tuple(x.shape)} by {tuple(w.shape)}"
            return self._leave(w, by_input.when, what, why), self._leave(w, by_filters.when, what, why)
        by_x = by_w = Choice(None, Line("", "", "", "", ""))
        if mask[0]:
            by_x = self._choose(w, by_input, options, grad, w)
            call_x = by_x.call
            if call_x is not None:
                by_x = replace(by_x, call=lambda grad, w, x: call_x(grad, w, None))
        if mask[1]:
            swapped = options.transposed
            by_w = self._choose(w, by_filters, options, *((grad, x) if swapped else (x, grad)))
            call_w = by_w.call
            if call_w is not None and swapped:
                by_w = replace(by_w, call=lambda grad, w, x: call_w(grad, x, None))
            elif call_w is not None:
                by_w = replace(by_w, call=lambda grad, w, x: call_w(x, grad, None))
        return by_x, by_w

    def _choose(
        self, weight: Any, op: Operation, options: Options, first: Any, second: Any, bias: Any = None,
        outside: bool = False,
    ) -> Choice:  # fmt: skip
        """leanconv's call for an operation with these tensors, if it can run and is expected to be faster."""
        arrays = arrays_of(first)
        assert arrays is not None
        index = arrays.device(first)
        try:
            problem = self.problem(op, options, first.dtype)
            name, why, _, _, other = self.decide(weight, problem, index)
            if not name and not (other and outside):
                left = self._leave(weight, op.when, str(problem), why)
                return replace(left, outside=bool(other) and op.when == "forward")
            x, w = (each.detach().unsqueeze(-2) if op.signals else each.detach() for each in (first, second))
            bias = None if bias is None else bias.detach()
            call = bind.bind(of_problem(problem, x, w, bias, workspace(problem)))
        except (ValueError, TypeError) as error:
            return self._leave(weight, op.when, f"{tuple(first.shape)}, {tuple(second.shape)}", str(error))
        except (CudaUnavailableError, CompileError) as error:
            warnings.warn(f"leanconv leaves {problem} to PyTorch: {error}", RuntimeWarning, stacklevel=2)
            return self._leave(weight, op.when, str(problem), str(error).splitlines()[0])
        ready, captured = call if isinstance(call, GpuCall) else None, None
        if not name:
            left = self._leave(weight, op.when, str(problem), why)
            if ready is None:
                return left
            name, captured = other, left.line
            why += "; outside of CUDA graphs it is taken: the host launches it sooner, and packed filters are kept"
        line = self._line(weight, op.when, str(problem), f"leanconv: {name}", why)
        if op.signals:
            return Choice(
                lambda a, b, c: call(a.unsqueeze(-2), b.unsqueeze(-2), c, None).squeeze_(-2), line, problem, captured,
                ready=ready,
            )  # fmt: skip
        return Choice(lambda a, b, c: call(a, b, c, None), line, problem, captured, ready=ready)

    def problem(self, op: Operation, options: Options, dtype: Any) -> ConvProblem:
        """What an operation of a layer computes. Raises ValueError and TypeError as `leanconv.conv2d` does."""
        name = str(dtype).removeprefix("torch.")
        precision = self._precision if tf32_allowed() and name == "float32" else stricter(self._precision, "fp32")
        requested = layer_options(
            FUNCTION_OF[op.op, len(op.x_shape) - 2], with_rows(options.stride, 1), with_rows(options.padding, 0),
            with_rows(options.dilation, 1), options.groups, precision=precision,
            batch_invariant=self._batch_invariant and op.op != "wgrad",
        )  # fmt: skip
        bias_shape = (op.x_shape[1] if op.op == "dgrad" else op.w_shape[0],) if op.bias else None
        return layer_problem(requested, op.x_shape, op.w_shape, bias_shape, DTYPES[name].name, op.layout)

    def decide(self, weight: Any, problem: ConvProblem, index: int | None) -> Decision:
        """Which algorithm takes it, if any. ``index`` is the GPU's number."""
        why = self._why_not_wanted(weight, problem)
        if why or index is None or problem.is_empty:
            return Decision(
                "", why or ("its tensors lie on the CPU" if index is None else "there is nothing to compute")
            )
        try:
            loaded = bind.load(problem, index, "auto", workspace(problem))
        except NoAlgorithmError:
            return Decision("", "no algorithm can run it")
        name, tf32 = loaded.choice.algorithm.name, tf32_allowed() and problem.dtype == "float32"
        if problem.batch_invariant:  # what PyTorch runs, and whether it were faster, depends on the batch
            return Decision(name, "batch_invariant=True: it is taken in every batch")
        return compared(loaded, problem, tf32, pytorch_cycles(problem, loaded.device.target, tf32))

    def _why_not_wanted(self, weight: Any, problem: ConvProblem) -> str:
        identity = self._identity(weight)
        if identity is None and isinstance(self._exclude, Weights):
            return "it cannot be told whether these filters are excluded"
        if self._include is not None and not self._include(identity, problem):
            return "not included"
        if self._exclude is not None and self._exclude(identity, problem):
            return "excluded"
        return ""

    def _leave(self, weight: Any, when: str, what: str, why: str) -> Choice:
        return Choice(None, self._line(weight, when, what, "PyTorch", why))

    def _line(self, weight: Any, when: str, what: str, runs: str, why: str) -> Line:
        name = self._names.get(self._identity(weight) or 0, "")
        key = name, when, what, runs, why
        if key not in self._lines and len(self._lines) >= _MOST_LINES:
            key = "", "", "more, which are not listed", "", ""
        if key not in self._lines:
            self._lines[key] = Line(*key)
        return self._lines[key]


def workspace(problem: ConvProblem) -> int | None:
    """The bytes of workspace that a call may take."""
    limit = limit_of(None)
    return _WEIGHT_WORKSPACE if limit is None and problem.op == "wgrad" else limit


def _nothing(identity: int | None, problem: ConvProblem) -> bool:
    """The selection of no layer."""
    return False


def _signature(tensor: Any) -> tuple[Any, ...]:
    """As `TorchArrays.signature`, but quicker: below autograd and lazy negation two of its fields mean nothing."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15
