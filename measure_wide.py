"""Gradients of large depthwise filters: leanconv by each candidate beside PyTorch; values against float64.

One line a result; everything in $OUT/wide.json. BUDGET seconds (default 45), most important first.
"""

import json, os, statistics, sys, time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

START = time.time()
BUDGET = float(os.environ.get("BUDGET", 45))
OUT = Path(os.environ.get("OUT", "."))
DRY = "--dry" in sys.argv
os.environ["LEANCONV_TUNING"] = "off"

from leanconv.kernels import ALGORITHMS
from leanconv.kernels.depthwise.depthwise_weight_large import DepthwiseWeightLarge
from leanconv.problem import ConvProblem

LARGE = next(a for a in ALGORITHMS if a.stem == "depthwise_weight_large")


def layer(n, c, h, r, s):
    return ConvProblem(n, c, h, h, c, r, s, padding=(r // 2, r // 2, s // 2, s // 2), groups=c, op="wgrad")


LAYERS = {
    "31x31-96x56": layer(32, 96, 56, 31, 31), "51x51-96x56": layer(8, 96, 56, 51, 51), "13x13-128x56": layer(32, 128, 56, 13, 13),
    "27x27-512x14": layer(32, 512, 14, 27, 27), "13x13-512x14": layer(32, 512, 14, 13, 13), "29x29-256x28": layer(32, 256, 28, 29, 29),
    "51x5-124x56": layer(32, 124, 56, 51, 5), "5x51-124x56": layer(32, 124, 56, 5, 51), "31x31-384x14": layer(32, 384, 14, 31, 31),
    "13x13-1024x7": layer(32, 1024, 7, 13, 13), "13x13-256x28": layer(32, 256, 28, 13, 13), "11x11-96x56": layer(32, 96, 56, 11, 11),
    "9x9-96x56": layer(32, 96, 56, 9, 9), "5x47-499x14": layer(32, 499, 14, 5, 47), "49x5-249x28": layer(32, 249, 28, 49, 5),
    "7x7-384x14": layer(32, 384, 14, 7, 7), "51x51-96x56-n32": layer(32, 96, 56, 51, 51),
}


def jobs():
    names = list(LAYERS)
    for first, last, dtype in ((0, 6, "float32"), (0, 3, "float16"), (6, len(names), "float32"), (3, 8, "float16")):
        for name in names[first:last]:
            for layout in ("NCHW", "NHWC"):
                yield name, replace(LAYERS[name], dtype=dtype, layout=layout)


def several(problem, target, most):
    """The best by prediction, and the best of each number of planes, threads, rows of a tile, bands and split."""
    timed, found = LARGE.within(problem, target, 0), {}
    for cycles, c in timed:
        for key in (("planes", c.planes), ("threads", c.threads // 128), ("rows", c.tile_p), ("bands", c.bands > 1), ("split", c.split)):
            if key not in found and cycles <= 2 * timed[0][0]:
                found[key] = (cycles, c)
    kept = list(dict.fromkeys([*timed[:2], *sorted(found.values(), key=lambda f: f[0])]))
    return kept[:most]


def candidates(problem, target):
    """Name, predicted cycles, plan."""
    found = []
    name = next(name for name, p in LAYERS.items() if replace(problem, dtype="float32", layout="NCHW") == p)
    first = list(LAYERS).index(name) < 6
    for i, (cycles, c) in enumerate(several(problem, target, (6 if first else 3) if problem.dtype == "float32" else 2)):
        plan = LARGE.plan(problem, c, target)
        found.append((f"{c}", cycles, plan))
        for unrolled in (4,) if i == 0 and first and problem.dtype == "float32" else ():
            first, *rest = plan.launches
            first = replace(first, problem=tuple((k, unrolled if k == "unrolled" else v) for k, v in first.problem))
            found.append((f"unrolled={unrolled} {c}", cycles, replace(plan, launches=(first, *rest))))
    old = [(a.within(problem, target, 0), a) for a in ALGORITHMS
           if a is not LARGE and not a.by_name_only and not a.reasons(problem, target)]
    timed, a = min(((t[0], a) for t, a in old if t), key=lambda f: f[0][0])
    if timed[0] < 2e7:
        found.append((f"old {a.stem} {timed[1]}", timed[0], a.plan(problem, timed[1], target)))
    return found


if DRY:
    from tests.cases import TARGETS

    rows, kernels = 0, set()
    for name, problem in jobs():
        for text, cycles, plan in candidates(problem, TARGETS[0]):
            rows += 1
            kernels |= {str(l.symbol) + str(l.problem) + str(l.tuning) for l in plan.every_launch}
            if "old" in text or "unrolled=" in text or problem.dtype == "float32" and "-v" in sys.argv:
                print(name, problem.layout, problem.dtype, f"{cycles / 1755:.0f} us", text)
    print(rows, "candidates", len(kernels), "kernels", "%.1f s" % (time.time() - START))
    sys.exit()

import torch
from leanconv.call.gpu_call import roles_of
from leanconv.runtime import cache
from leanconv.runtime.launch import open_device

device = open_device(0)
target = device.target
pool = ThreadPoolExecutor(max(2, (os.cpu_count() or 4) - 2))


def compile_plan(plan):
    for launch in plan.every_launch:
        cache.compiled(launch, target.arch)


work = []
for name, problem in jobs():
    found = [(*each, pool.submit(compile_plan, each[2])) for each in candidates(problem, target)]
    work.append((name, problem, found))
print(f"{sum(len(w[2]) for w in work)} candidates {time.time() - START:.0f} s", flush=True)

TYPES = {"float32": torch.float32, "float16": torch.float16}
flush_buffer = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
torch.backends.cudnn.benchmark = True
torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def timed(call):
    call()
    torch.cuda.synchronize()
    t = time.time()
    call()
    torch.cuda.synchronize()
    n = 1 if time.time() - t > 20e-3 else 3 if time.time() - t > 2e-3 else 9
    pairs = []
    for _ in range(n):
        flush_buffer.zero_()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(), call(), b.record()
        pairs.append((a, b))
    torch.cuda.synchronize()
    return 1000 * statistics.median(a.elapsed_time(b) for a, b in pairs)


def gradient(p, x, dy, w):
    return torch.ops.aten.convolution_backward(
        dy, x, w, None, [1, 1], [p.padding[0], p.padding[2]], [1, 1], False, [0, 0], p.groups, [False, True, False]
    )[1]


def wanted_of(p, x, dy):
    """In float64, by transforms: exact to 1e-13."""
    h, w = p.h + p.r, p.w + p.s
    found = torch.zeros(p.k, p.r, p.s, dtype=torch.float64, device="cuda")
    for n in range(0, p.n, 4):
        fx = torch.fft.rfft2(x[n : n + 4].double(), s=(h + p.p, w + p.q))
        fy = torch.fft.rfft2(dy[n : n + 4].double(), s=(h + p.p, w + p.q))
        corr = torch.fft.irfft2((fx * fy.conj()).sum(0), s=(h + p.p, w + p.q))
        corr = torch.roll(corr, (p.padding[0], p.padding[2]), (1, 2))
        found += corr[:, : p.r, : p.s]
    return found


def memory_order(v, layout):
    return v.contiguous() if layout == "NCHW" else v.permute(0, 2, 3, 1).contiguous()


results, current = [], None
for name, problem, each in work:
    if time.time() - START > BUDGET:
        print("out of time before", name, problem.layout, problem.dtype)
        break
    if current != (name, problem.dtype):
        current = name, problem.dtype
        g = torch.Generator(device="cuda").manual_seed(1)
        make = lambda *shape: torch.randn(*shape, device="cuda", generator=g).to(TYPES[problem.dtype])
        x, dy = make(problem.n, problem.c, problem.h, problem.w), make(problem.n, problem.k, problem.p, problem.q)
        w = make(problem.k, 1, problem.r, problem.s)
        peers = {}
        for layout in ("NCHW", "NHWC"):
            held = [v.contiguous(memory_format=torch.channels_last) if layout == "NHWC" else v for v in (x, dy, w)]
            try:
                peers[layout] = timed(lambda: gradient(problem, *held))
            except RuntimeError as e:
                print("  peer failed", current, layout, str(e)[:80])
        wanted = wanted_of(problem, x, dy)
        shown = " ".join(f"{k} {v:.1f}" for k, v in peers.items())
        tflops = problem.flops / 67e12 * 1e6
        print(f"{time.time() - START:5.1f} s  {name} {problem.dtype}: PyTorch {shown}; at 67 TFLOP/s {tflops:.1f} us", flush=True)
    roles = roles_of(problem)
    held = {"x": memory_order(x, problem.layout), "dy": memory_order(dy, problem.layout)}
    held["dw"] = torch.empty(problem.k, problem.r, problem.s, dtype=TYPES[problem.dtype], device="cuda")
    lines = []
    for text, cycles, plan, ready in each:
        line = {"name": name, "dtype": problem.dtype, "layout": problem.layout, "config": text, "predicted_cycles": cycles,
                "peers": peers}
        try:
            ready.result(timeout=60)
            run = device.executable(plan, roles)
            held["dw"].fill_(float("nan"))
            values = [t.data_ptr() if (t := held.get(role)) is not None else 0 for role in roles]
            call = lambda: run(0, values)
            call()
            torch.cuda.synchronize()
            got = held["dw"].double().reshape(wanted.shape)
            line["error"] = float((got - wanted).norm() / wanted.norm())
            line["us"] = timed(call)
        except Exception as e:
            line["failed"] = f"{type(e).__name__}: {e}"[:300]
        lines.append(line)
        results.append(line)
    quickest = min(peers.values(), default=0)
    for line in sorted(lines, key=lambda l: l.get("us", 1e9)):
        text = line["config"].replace("LargeWeightConfig", "")
        if "us" in line:
            print(f"   {problem.layout} {line['us']:.1f} us (model {line['predicted_cycles'] / 1755:.0f}) "
                  f"x{quickest / line['us']:.2f} of PyTorch, {problem.flops / line['us'] / 1e6:.1f} TFLOP/s, error {line['error']:.1e} {text}", flush=True)
        else:
            print(f"   {problem.layout} FAILED {line['failed']} {text}", flush=True)
    OUT.joinpath("wide.json").write_text(json.dumps(results))
print(f"done {time.time() - START:.0f} s", flush=True)
pool.shutdown(wait=False, cancel_futures=True)
os._exit(0)
