"""How long PyTorch's own convolution would take: `enable` compares leanconv's predicted time with it."""

from __future__ import annotations

from math import inf, prod

from leanconv.dtypes import item_bytes
from leanconv.kernels.contract import ceil_div
from leanconv.kernels.cost import moved_bytes, overlapped
from leanconv.plan import Target
from leanconv.problem import ConvProblem, Problem

# Fitted to an H200 (PyTorch 2.11, cuDNN 9.19), channels first and last.

#: Share of the FP32 cores' peak that cuDNN reaches on layers of many channels.
_FP32 = 0.58
#: Of images forward on them: clock cycles for each product of an output's sum, which a block computes one after the
#: other. For one image of few pixels that is most of the time: layers of ResNet-50 and EfficientNet-B0 with 7x7 and
#: 14x14 pixels take cuDNN much longer than products and memory would.
_SERIAL_FP32 = 45
#: Share of the tensor cores' peak, at 10 bits and at 16, on layers of infinitely many channels; how many channels halve
#: it; and what part of that remains in the gradient of the filters.
_TF32 = (0.46, 60, 0.64), (0.63, 37, 0.55)
_16BIT = (0.62, 50, 1.0)
#: Of images in TF32, forward, channels first of several taps, and channels last: the share of the tensor cores' peak on
#: layers of infinitely many channels, and how many channels halve it; clock cycles for each product of an output's sum,
#: up to so many, and for each one more, since a block computes these one after the other; the share of the memory's
#: speed; what part of the shorter of products and memory the longer does not hide; and clock cycles beside both. Fitted
#: to 58 and 136 measured layers of more than 8 channels and up to 25 taps: half are within 6 % and 9 %.
_IMAGES_TF32 = (0.78, 18, 3.7, 6.9, 0.28, 0.76, 24200), (0.9, 56, 11.5, 3.4, 0.95, 0.4, 8530)
_SERIAL, _USUAL_TAPS = 512, 25
#: Of images in 16 bits without groups. By operation the share of the tensor cores' peak on layers of infinitely many
#: channels, channels first and last; how many channels halve it; what part of the shorter of products and memory the
#: longer does not hide; clock cycles beside both, and those of the gradient of filters. Fitted to the 317 measured
#: layers of suites and of torchvision's networks: half are within a tenth, of a network left out within a sixth.
_IMAGES_16BIT = {"fprop": (0.5, 0.65), "dgrad": (0.64, 0.75), "wgrad": (0.69, 0.77)}
_IMAGES_HALF, _IMAGES_LESSER, _IMAGES_BESIDE, _IMAGES_WEIGHT_BESIDE = 21, 0.48, 8200, (19200, 14800)
#: Forward, channels last, of the sizes that `_USUAL_TAPS` and `_FEW` say, as many clock cycles at least, and more for
#: each product of an output's sum above `_SERIAL`.
_IMAGES_LEAST, _IMAGES_SERIAL = 11900, 3.2
#: channels first they are rearranged at this share of the memory's speed, in so many clock cycles beside that
_IMAGES_REARRANGED = 0.68, 9150
#: Channels last and with several taps, channels that are no multiple of 8 are padded before, and results cut after: so
#: much of the memory's speed, and so many clock cycles. Explored (H200, 81bb595): of eight layers of 18 to 250
#: channels, which took 1.7 to 3.7 times what was expected, it is 0.69 to 0.95 of the time now; of four gradients of
#: filters 0.54 to 0.66. So are filters of one tap whose number is no multiple of 8: the 21 of U-Net's head took 129 and
#: 14 µs at 8 images and at one, where 124 and 26 are expected.
_IMAGES_PADDED = 0.3, 18000
#: Of volumes in 16 bits without groups, forward: times as long as by the same formulas, of filters with one tap, with
#: taps in rows and columns alone, along the depth alone, and in all; channels first and last; and how many times that
#: where channels or filters are no multiples of 8. Explored (H200, 11436c63): of 184 layers of R(2+1)D, S3D and suite
#: conv3d half are within a seventh.
_VOLUMES_16BIT = (0.9, 1.2, 1.25, 1.0), (0.95, 1.55, 1.3, 0.9)
_VOLUMES_16BIT_OTHER = (1.0, 1.0, 1.3, 1.0), (1.0, 1.1, 3.0, 1.5)
#: Of groups and volumes in 16 bits, channels first: all tensors are rearranged at this share of the memory's speed, by
#: launches of their own before the product and after it.
_REARRANGED, _REARRANGING = 0.5, 2
#: Of layers in groups of several channels, on tensor cores: the fewest channels that a group takes in a product; what
#: part remains of the share above; of that in the gradient of the filters, in 16 bits and in TF32 by layout; and where
#: a group's channels are no power of two, for which cuDNN has slower kernels.
_GROUP_TILE, _GROUPS, _GROUPS_WEIGHT, _GROUPS_OTHER = 32, 0.75, {"16 bits": 1.0, "NCHW": 0.55, "NHWC": 0.3}, 1 / 3
#: of depthwise layers' multiply-adds, of the peak of the FP32 cores
_DEPTHWISE = {"fprop": (0.06, 0.15), "dgrad": (0.035, 0.12), "wgrad": (0.03, 0.07)}
#: Times as long as that, of filters of more than 25 taps, in float32, channels last. Explored (H200, ec68a949): of
#: layers of 7x7 taps PyTorch takes 2.0 to 2.8 times as long, 1.5 to 2.1, and 7.8 to 21; larger ones are not measured.
_DEPTHWISE_TAPS, _DEPTHWISE_LARGE = (25, 49), {"fprop": 2.0, "dgrad": 1.5, "wgrad": 7.8}
#: of the memory's speed that large tensors pass at; in depthwise layers; and in layers of few channels
_MEMORY, _MEMORY_GROUPS, _MEMORY_DEPTHWISE, _MEMORY_FEW = 0.6, 0.5, 0.5, {"fprop": 0.35, "dgrad": 0.2, "wgrad": 0.2}
_FEW = 8
#: What part of PyTorch's expected time leanconv's predicted time may be: such that of the layers that it takes few
#: lose more than a little (tests/torch/test_expected_time.py has the limits). Where none of the measured lost, it is
#: the most that was predicted. Chosen without one of eight networks, of what is then taken of that network 13 of 360
#: lost in 16 bits, and 12 of 1004 in float32.
_MOST_FP32 = {"fprop": 1.5, "dgrad": 1.3, "wgrad": 1.5}
#: of gradients of filters of several taps, channels first
_MOST_FP32_WEIGHT_NCHW = 0.74
_MOST_TF32, _MOST_TF32_IMAGES = {"1x1": 0.7, "other": 0.83, "gradient": 0.3}, 0.92
#: Forward where leanconv computes in TF32 too, channels last, of layers that `_IMAGES_TF32` is for: of 93 layers of
#: opencnn, ResNet-50 and single images 79 are taken, of which one loses, and 55 of the 58 that would win.
_MOST_BOTH_TF32 = {"1x1": 1.0, "other": 0.95}
#: Of gradients of the input where leanconv computes in TF32 too, channels last, where PyTorch is expected to take as
#: many microseconds as `_LONG_US` says: with one tap and with several, by whether there are strides. Of the 39 layers
#: of ResNet-50 and of suite opencnn 34 are taken, and none of them lost. Explored (H200, a06f7127): of 17 with several
#: taps and strides 11 are taken, which won 1.1 to 2 times; of the others two lost. Fewer channels, and numbers of them
#: that copies do not take, were not measured.
_MOST_BOTH_TF32_INPUT, _BOTH_TF32_CHANNELS = {"1x1": (1.2, 1.75), "other": (1.1, 1.4)}, 64
#: Of gradients of filters of several taps where leanconv computes in TF32 too, channels last, of as many channels: of
#: the 27 layers of ResNet-50, U-Net and ConvNeXt-T 16 are taken, and none loses (step-layers.json).
_MOST_BOTH_TF32_WEIGHT = 0.9
#: in TF32 of layers with more than 9 taps and many channels, channels first and last
_MOST_TF32_LARGE = 0.4, 1.0
#: Of filters of more than 225 taps with fewer than 96 channels: cuDNN's FFT takes less than expected.
_FFT_TAPS, _FFT_CHANNELS, _MOST_FFT = 225, 96, 0.51
_MOST_16 = {"1x1": 0.9, "up to 9 taps": 1.0, "other": 0.74}
#: The same channels first, of layers that native_gemm_pointwise and native_gemm_planes compute: ResNet-50's 15 are
#: taken, and none loses.
_MOST_16_NCHW = 0.95
#: In 16 bits channels last, 1x1: where PyTorch is expected to take so many microseconds, of 18 layers 11 won and one
#: lost; of 18 shorter ones one won. Of six of fewer than `_WIDE` channels none won (step-layers.json, layers.json).
_MOST_16_LONG, _LONG_US, _WIDE = 0.98, 11, 48
#: Gradients of the input, by taps and whether there are strides. Channels last kernels read the layer's filters as they
#: lie: of the 39 layers of ResNet-50 and of suite opencnn 30 are taken, of which the least has 0.97 of PyTorch's speed.
#: Explored (H200, d78b9bd5): of five with one tap, where PyTorch takes less than those microseconds, leanconv has 0.89
#: to 1.34 of it. Of 33 others none won.
_MOST_16_INPUT, _MOST_16_INPUT_OTHER = {"1x1": (1.05, 1.16), "other": (1.09, 1.1)}, 0.5
#: Channels first of ResNet-50's 15 layers that native_gemm_pointwise and native_gemm_planes compute ten are taken, of
#: which the least has 1.03 of PyTorch's speed.
_MOST_16_INPUT_NCHW = {"pointwise": 0.89, "1x1": 0.5, "other": 0.86}
#: Of gradients of filters: where both numbers of channels are multiples of 8, channels last; channels first; others, of
#: few channels, with one tap, and with several. Explored (H200, d33bb4b4): channels first 17 of 28 layers of opencnn
#: and im2win are taken, which took PyTorch 1.27 times as long and more.
_MOST_16_WEIGHT, _MOST_16_WEIGHT_NCHW = {"1x1": 0.95, "other": 1.13}, 0.97
_MOST_16_WEIGHT_OTHER = {"few": 0.5, "1x1": 0.5, "other": 1.0}
#: Of layers in groups of several channels, and in 16 bits channels first and last. Of the 180 measured ones of
#: ResNeXt-50 and RegNet-Y-1.6GF, with their gradients, none that is taken so lost; with shares chosen for the other
#: network alone one did (benchmarks/results/nvidia-h200/group-layers.json).
_MOST_GROUPS_FP32 = {"fprop": 1.6, "dgrad": 3.0, "wgrad": 1.6}
_MOST_GROUPS_TF32 = {"fprop": 1.36, "dgrad": 1.36, "wgrad": 1.8}
#: The same channels last, forward, where a group has so many channels or a power of two: of seven layers of suite
#: grouped with 64 and 120 three lost.
_GROUPS_MANY, _MOST_GROUPS_MANY = 64, 0.7
#: The same where leanconv computes in TF32 too, channels first and last. Explored (H200, 13330f93, suite grouped): of
#: 87 measured layers and gradients 78 are taken. None of them takes more than 4 % longer than PyTorch's, and none is
#: left that would win more than 5 %. Of gradients of the input five were measured, channels first; what is predicted of
#: the fifteen in group-layers.json in each layout is at most 0.9 of PyTorch's times there.
_MOST_GROUPS_BOTH_TF32 = {"fprop": (1.45, 1.1), "dgrad": (1.25, 1.1), "wgrad": (1.35, 1.0)}
_MOST_GROUPS_16 = {"fprop": (1.0, 1.3), "dgrad": (0.78, 1.1), "wgrad": (1.25, 0.82)}
#: Of depthwise layers, and of those of up to 9 taps, channels last, in float32; in 16 bits; and of the gradient of the
#: filters in 16 bits of up to 9 taps and of more, channels first and last.
_MOST_DEPTHWISE = {"fprop": (1.2, 1.13), "dgrad": (1.63, 1.14), "wgrad": (1.9, 0.85)}
#: Of gradients of filters of up to 9 taps in float32, channels last, and of up to so many output pixels: of 18 measured
#: layers 17 won.
_DEPTHWISE_PIXELS, _MOST_DEPTHWISE_PIXELS = 196, 2.2
_MOST_DEPTHWISE_16, _MOST_DEPTHWISE_16_WEIGHT = {"fprop": 1.14, "dgrad": 1.58}, ((0.9, 0.28), (0.62, 0.58))
#: Of volumes, in strict FP32, in TF32, and in 16 bits by the most channels that a share is for. Explored (H200,
#: ef45da80, suite conv3d channels last; 05d2ebb, 144 of its layers by operation, type and layout): of what is taken so
#: none lost. PyTorch's gradients of filters with few channels take down to a third of what is expected in 16 bits.
#: Groups of several channels are not measured.
_MOST_VOLUMES_FP32 = {"fprop": 1.0, "dgrad": 1.1, "wgrad": 1.3}
_MOST_VOLUMES_TF32 = {"fprop": 0.715, "dgrad": 0.8, "wgrad": 0.5}
#: The same forward, channels first, of more channels than `_FEW`: of 16 layers of suite conv3d PyTorch takes most in
#: half to two thirds of what is expected. Gradients of the input are not measured, and taken to be alike.
_MOST_VOLUMES_TF32_NCHW = 0.42
_MOST_VOLUMES_16 = {"dgrad": ((inf, 0.65),), "wgrad": ((32, 0.4), (inf, 0.5))}
#: Forward, by filters and layout as `_VOLUMES_16BIT`. Explored (H200, 11436c63): of those 184 layers 90 are taken, 4 of
#: them lose more than 5 %, and 79 of the 106 that would win are among them; one more of these lost in suite conv3d
#: (be2fb28d) and is left now.
_MOST_VOLUMES_16_FORWARD = (0.9, 1.0, 0.9, 0.9), (0.75, 0.93, 0.8, 0.95)
_MOST_VOLUMES_DEPTHWISE, _MOST_VOLUMES_GROUPS = 0.8, 0.3
#: times as long as expected of images: PyTorch's depthwise layers of volumes, channels last. Explored (H200, 05d2ebb):
#: of three layers and their gradients 5 to 100 times.
_DEPTHWISE_VOLUMES = 4
#: clock cycles of a launch: of PyTorch's time, and of leanconv's where its prediction leaves it out
LAUNCH = 5940
#: clock cycles in a microsecond, of an H200 at work
CYCLES_PER_US = 1980
#: Microseconds of the GPU that a layer must save where its gradient is recorded in Python, and from which time of
#: PyTorch's on the host waits for the GPU. Explored (H200, ea44918b): of EfficientNet-B0, whose step waits for the
#: host, a layer that is taken keeps it busy for 103 to 136 longer than PyTorch's own, forward and backward.
#: With two or three that save 200 (e1e737c8) its steps took 2 to 9 % longer.
_RECORDING_US, _BUSY_US = 300, 400
#: Outside of CUDA graphs the GPU waits for the host while layers are so short, in microseconds; there a layer is taken
#: that keeps the GPU busy for at most so many more, since the host launches it sooner. Explored (H200, 11436c63): in
#: five networks of torchvision, TF32 and 16 bits, the host needs 15 to 30 for a layer that is taken, 22 to 32 for one
#: that is left, and 50 to 80 for either with the layers between two convolutions.
_SHORT_US, _LATER_US = 20, 4


def engine(problem: Problem, tf32: bool, searched: bool = True) -> str:
    """What the times of PyTorch are called in a table: ``torch-fp32``, ``torch-tf32``, ``torch-float16``, ...

    ``searched``: whether ``torch.backends.cudnn.benchmark`` is on. If not, the name ends in ``-unsearched``.
    """
    kind = ("tf32" if tf32 else "fp32") if problem.dtype == "float32" else problem.dtype
    return f"torch-{kind}{'' if searched else '-unsearched'}"


def pytorch_cycles(problem: ConvProblem, target: Target, tf32: bool) -> float:
    """Clock cycles that PyTorch's convolution is expected to take, in the unit of `Candidate.cost`.

    ``tf32``: whether PyTorch may round float32 factors to 10 bits. The figures are for an H200; other GPUs are taken to
    reach the same shares of their peaks. Large filters, for which cuDNN may take an FFT, are the least certain, most so
    in strict FP32 without `torch.backends.cudnn.benchmark`.

    Explored (H200, 1662f71): of 2336 measured layers it is within a factor of two for 1898, of 294 in 16 bits for 290.
    """
    if problem.is_volume and tf32 and problem.dtype == "float32" and problem.groups == 1:
        # of few channels cuDNN takes what it takes in strict FP32, or does as well
        return min(_cycles(problem, target, True), _cycles(problem, target, False))
    return _cycles(problem, target, tf32)


def _cycles(problem: ConvProblem, target: Target, tf32: bool) -> float:
    last = problem.layout == "NHWC"
    if problem.dtype != "float32" and problem.groups == 1 and not problem.is_volume:
        return _images_16bit(problem, target, last)
    if tf32 and _is_image_in_tf32(problem):
        return _images_tf32(problem, target, last)
    if problem.dtype != "float32" and problem.groups == 1 and problem.op == "fprop":
        kind, other = _taps_of_volumes(problem), problem.c % 8 > 0 or problem.k % 8 > 0
        times = _VOLUMES_16BIT[last][kind] * (_VOLUMES_16BIT_OTHER[last][kind] if other else 1)
        return times * _images_16bit(problem, target, last)
    lanes = target.multiprocessors * target.fma_lanes
    products, moved = problem.flops / 2, float(problem.bytes)
    channels = min(problem.group_c, problem.group_k)
    if problem.group_c == 1 and problem.groups > 1:
        work, share = products / (lanes * _DEPTHWISE[problem.op][last]), _MEMORY_DEPTHWISE
        above, up_to = _DEPTHWISE_TAPS
        if last and problem.dtype == "float32" and above < problem.taps <= up_to and not problem.is_volume:
            work *= _DEPTHWISE_LARGE[problem.op]
    else:
        share = _MEMORY_FEW[problem.op] if channels <= _FEW else _MEMORY
        is_16bit = problem.dtype != "float32"
        if problem.groups > 1 and (is_16bit or tf32):
            # those of volumes are not measured: nothing is quicker than memory
            work = 0.0 if problem.is_volume else _grouped(problem, target, is_16bit)
            share = 1.0 if problem.is_volume else _MEMORY_GROUPS
            forward = problem.op == "fprop" and not problem.is_volume
            if not is_16bit and last and forward and _is_power_of_two(problem.group_c):
                # Explored (H200, 13330f93): of six pairs strided ones take 0.94 to 1.19 times as long as others of as
                # many outputs
                moved -= prod(problem.x_shape) * item_bytes(problem.dtype) * (1 - 1 / prod(problem.stride))
        elif is_16bit or tf32:
            # a tensor core multiplies at least 16 channels, a tile 64 filters, of volumes in TF32 fewer
            tile = 32 if problem.is_volume and not is_16bit else 64
            products *= ceil_div(problem.group_k, tile) * tile / problem.group_k
            products *= ceil_div(problem.group_c, 16) * 16 / problem.group_c
            most, half, filters = _16BIT if is_16bit else _TF32[last]
            peak = target.multiprocessors * target.tensor_flops / (2 if is_16bit else 4)
            channels = max(16, channels)
            reached = most * channels / (channels + half) * (filters if problem.op == "wgrad" else 1.0)
            work = products / (peak * reached)
        else:
            products *= ceil_div(problem.group_k, 32) * 32 / problem.group_k
            if problem.group_c == 3:  # as many as 4 take
                products *= 4 / 3
            work = products / (lanes * _FP32 * _transformed(problem, channels))
            if problem.op == "fprop" and not problem.is_volume and problem.taps <= _USUAL_TAPS:
                work += _SERIAL_FP32 * problem.group_c * problem.taps
    cycles = max(work, moved / (share * target.bytes_per_cycle)) + LAUNCH
    if problem.is_volume and last and problem.groups > 1 and problem.group_c == 1:
        cycles *= _DEPTHWISE_VOLUMES
    if _is_rearranged(problem):
        cycles += 2 * problem.bytes / (_REARRANGED * target.bytes_per_cycle) + _REARRANGING * LAUNCH
    return cycles


def _images_16bit(problem: ConvProblem, target: Target, last: bool) -> float:
    op, channels, products = problem.op, min(problem.c, problem.k), _tiled_products(problem)
    reached = _IMAGES_16BIT[op][last] * max(16, channels) / (max(16, channels) + _IMAGES_HALF)
    work = products / (target.multiprocessors * target.tensor_flops / 2 * reached)
    moved = moved_bytes(problem) if op == "fprop" else problem.bytes
    memory = moved / ((_MEMORY_FEW[op] if channels <= _FEW else 1.0) * target.bytes_per_cycle)
    cycles = overlapped(work, memory, _IMAGES_LESSER)
    cycles += _IMAGES_WEIGHT_BESIDE[last] if op == "wgrad" else _IMAGES_BESIDE
    if last and _is_usual_image(problem):
        cycles = max(cycles, _IMAGES_LEAST + _IMAGES_SERIAL * max(problem.c * problem.taps - _SERIAL, 0))
    if _is_rearranged(problem):
        share, beside = _IMAGES_REARRANGED
        cycles += 2 * problem.bytes / (share * target.bytes_per_cycle) + beside
    padded = problem.c > _FEW and problem.c % 8 > 0 and problem.r * problem.s > 1
    padded |= op == "fprop" and problem.k % 8 > 0 and problem.taps == 1 and problem.p * problem.q > 1
    if last and op != "dgrad" and padded and not problem.is_volume:
        share, beside = _IMAGES_PADDED
        cycles += moved / (share * target.bytes_per_cycle) + beside
    if problem.bias and op == "fprop":  # a pass over the result
        cycles += 2 * prod(problem.y_shape) * item_bytes(problem.dtype) / target.bytes_per_cycle + LAUNCH / 2
    return cycles


def _is_usual_image(problem: ConvProblem) -> bool:
    """Whether it is a forward layer of many channels and few taps."""
    image = problem.op == "fprop" and problem.groups == 1 and not problem.is_volume and problem.dilation == (1, 1)
    return image and problem.r * problem.s <= _USUAL_TAPS and min(problem.c, problem.k) > _FEW


def _is_image_in_tf32(problem: ConvProblem) -> bool:
    """Whether `_images_tf32` is fitted to layers of this kind."""
    return _is_usual_image(problem) and (problem.layout == "NHWC" or problem.r * problem.s > 1)


def _tiled_products(problem: ConvProblem) -> float:
    """Of an image without groups on tensor cores, which multiply at least 16 channels, in tiles of 64 filters."""
    return problem.flops / 2 * ceil_div(problem.k, 64) * 64 / problem.k * ceil_div(problem.c, 16) * 16 / problem.c


def _images_tf32(problem: ConvProblem, target: Target, last: bool) -> float:
    most, half, each, more, share, lesser, beside = _IMAGES_TF32[last]
    channels, serial = max(16, min(problem.c, problem.k)), problem.c * problem.taps
    work = _tiled_products(problem) * (1 + half / channels) / (target.multiprocessors * target.tensor_flops / 4 * most)
    work += each * min(serial, _SERIAL) + more * max(serial - _SERIAL, 0)
    return overlapped(work, moved_bytes(problem) / (share * target.bytes_per_cycle), lesser) + beside


def _taps_of_volumes(problem: ConvProblem) -> int:
    """Which filters of `_VOLUMES_16BIT` these are."""
    return (problem.r * problem.s > 1) + 2 * (problem.t > 1)


def _grouped(problem: ConvProblem, target: Target, is_16bit: bool) -> float:
    """Clock cycles of the products of a layer in groups of several channels, on tensor cores."""
    kind = "16 bits" if is_16bit else problem.layout
    most, half, _ = _16BIT if is_16bit else _TF32[kind == "NHWC"]
    products = problem.flops / 2 * ceil_div(problem.group_c, _GROUP_TILE) * _GROUP_TILE / problem.group_c
    if problem.op == "dgrad":  # of the pixels that stride passes over too
        products *= problem.stride[0] * problem.stride[1]
    channels = max(_GROUP_TILE, min(problem.group_c, problem.group_k))
    reached = _GROUPS * most * channels / (channels + half)
    if problem.op == "wgrad":
        reached *= _GROUPS_WEIGHT[kind]
    if not _is_power_of_two(problem.group_c):
        reached *= _GROUPS_OTHER
    return products / (target.multiprocessors * target.tensor_flops / (2 if is_16bit else 4) * reached)


def most_share(problem: ConvProblem, algorithm: str, tf32: bool, pytorch: float) -> float:
    """leanconv takes a layer, which the algorithm of that `stem` computes, if its predicted time is below this part of
    what PyTorch is expected to take: ``pytorch`` clock cycles."""
    pointwise = algorithm in ("native_gemm_pointwise", "native_gemm_planes")
    op, taps, last, is_16bit = problem.op, problem.r * problem.s, problem.layout == "NHWC", problem.dtype != "float32"
    several, strided = taps > 1, problem.stride != (1, 1)
    if problem.is_volume:
        return _most_of_volumes(problem, tf32)
    if problem.groups > 1 and problem.group_c == 1:
        return _most_of_depthwise(problem)
    if problem.groups > 1 and (is_16bit or (tf32 and problem.precision == "tf32")):
        return (_MOST_GROUPS_16 if is_16bit else _MOST_GROUPS_BOTH_TF32)[op][last]
    if problem.groups > 1:
        if tf32 and last and op == "fprop" and (problem.group_c >= _GROUPS_MANY or _is_power_of_two(problem.group_c)):
            return _MOST_GROUPS_MANY
        return (_MOST_GROUPS_TF32 if tf32 else _MOST_GROUPS_FP32)[op]
    kind = "other" if several else "1x1"
    if is_16bit and op == "wgrad":
        if last:
            usual = problem.c % 8 == problem.k % 8 == 0
            # of few channels and of single pixels about as many lost as won (step-layers.json, layers.json)
            usual = usual and (several or (problem.p * problem.q > 1 and min(problem.c, problem.k) >= _WIDE))
            return _MOST_16_WEIGHT[kind] if usual else _MOST_16_WEIGHT_OTHER["few" if problem.c <= _FEW else kind]
        return _MOST_16_WEIGHT_NCHW
    if is_16bit and op == "dgrad" and not last:
        return _MOST_16_INPUT_NCHW["pointwise" if pointwise else kind]
    if is_16bit and op == "dgrad":
        usual = problem.c % 8 == problem.k % 8 == 0 and min(problem.c, problem.k) > _FEW
        long = several or pytorch >= _LONG_US * CYCLES_PER_US
        return _MOST_16_INPUT[kind][strided] if usual and long else _MOST_16_INPUT_OTHER
    if is_16bit:
        wide = min(problem.c, problem.k) >= _WIDE
        if last and not several and wide and pytorch >= _LONG_US * CYCLES_PER_US:
            return _MOST_16_LONG
        few = problem.c <= _FEW or taps > 9
        if not few and pointwise:
            return _MOST_16_NCHW
        return _MOST_16["other" if few else "up to 9 taps" if several else "1x1"]
    if op != "wgrad" and taps > _FFT_TAPS and problem.c < _FFT_CHANNELS:
        return _MOST_FFT
    both = tf32 and problem.precision == "tf32" and min(problem.c, problem.k) >= _BOTH_TF32_CHANNELS
    both = both and problem.c % 4 == problem.k % 4 == 0
    if both and op == "dgrad" and last and pytorch >= _LONG_US * CYCLES_PER_US:
        return _MOST_BOTH_TF32_INPUT[kind][strided]
    if both and op == "wgrad" and last and several:
        return _MOST_BOTH_TF32_WEIGHT
    if tf32 and _is_image_in_tf32(problem):
        if last and problem.precision == "tf32":
            return _MOST_BOTH_TF32[kind]
        if not last:
            return _MOST_TF32_IMAGES
    if tf32:
        large = taps > 9 and problem.c > _FEW and op == "fprop"
        return _MOST_TF32_LARGE[last] if large else _MOST_TF32[kind if op == "fprop" else "gradient"]
    return _MOST_FP32_WEIGHT_NCHW if op == "wgrad" and several and not last else _MOST_FP32[op]


def _most_of_depthwise(problem: ConvProblem) -> float:
    large, last = problem.r * problem.s > 9, problem.layout == "NHWC"
    if problem.dtype == "float32":
        if problem.op == "wgrad" and last and not large and problem.p * problem.q <= _DEPTHWISE_PIXELS:
            return _MOST_DEPTHWISE_PIXELS
        return _MOST_DEPTHWISE[problem.op][last and not large]
    return _MOST_DEPTHWISE_16_WEIGHT[last][large] if problem.op == "wgrad" else _MOST_DEPTHWISE_16[problem.op]


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _most_of_volumes(problem: ConvProblem, tf32: bool) -> float:
    if problem.groups > 1:
        return _MOST_VOLUMES_DEPTHWISE if problem.group_c == 1 else _MOST_VOLUMES_GROUPS
    if tf32 and problem.layout == "NCHW" and problem.op != "wgrad" and min(problem.c, problem.k) > _FEW:
        return _MOST_VOLUMES_TF32_NCHW
    if problem.dtype == "float32":
        return (_MOST_VOLUMES_TF32 if tf32 else _MOST_VOLUMES_FP32)[problem.op]
    if problem.op == "fprop":
        return _MOST_VOLUMES_16_FORWARD[problem.layout == "NHWC"][_taps_of_volumes(problem)]
    return next(share for channels, share in _MOST_VOLUMES_16[problem.op] if problem.c <= channels)


def worth_recording(saved: float, pytorch: float) -> bool:
    """Whether a layer is taken whose gradient is recorded: it saves so many of the clock cycles that PyTorch takes."""
    return saved > _RECORDING_US * CYCLES_PER_US or pytorch > _BUSY_US * CYCLES_PER_US


def launched_sooner(ours: float, pytorch: float) -> bool:
    """Whether a layer of so many clock cycles is taken where the GPU waits for the host: without a gradient and outside
    of CUDA graphs."""
    return max(ours, pytorch) < _SHORT_US * CYCLES_PER_US and ours < pytorch + _LATER_US * CYCLES_PER_US


def _is_rearranged(problem: ConvProblem) -> bool:
    """Whether cuDNN rearranges the tensors. With 1 x 1 filters they are factors of a matrix product as they lie, where
    images are whole units of 16 bytes."""
    if problem.dtype == "float32" or problem.layout != "NCHW" or (problem.group_c == 1 and problem.groups > 1):
        return False
    steps, around = {problem.stride_d, *problem.stride}, {*problem.padding_d, *problem.padding}
    product = (problem.taps, steps, around) == (1, {1}, {0})
    return not (product and problem.d * problem.h * problem.w % 8 == 0)


def _transformed(problem: ConvProblem, channels: int) -> float:
    """What cuDNN's transforms save of the products in FP32: an FFT of large filters; in the gradient of the filters
    more, the more channels there are, but nothing of 1 x 1 filters and of outputs of a few pixels. Its Winograd of the
    forward pass saves nothing that was measured. Of volumes it transforms none."""
    taps = min(problem.r * problem.s / 9, 8.0)
    if problem.op == "wgrad":
        if problem.r * problem.s == 1 or problem.p * problem.q <= 4:
            return 0.5
        if taps > 2 and problem.p * problem.q <= 16:  # hardly more than border in an FFT's tiles (without a search)
            return 1.2
        if problem.is_volume:
            return 1.0
        return float(min(max((channels / 96) ** 0.75, 0.6), 2.4)) * (1.5 if taps > 2 else 1.0)
    if problem.stride != (1, 1) or problem.dilation != (1, 1) or channels < 32 or problem.is_volume:
        return 1.0
    return float(max(1.0, taps**0.75))
