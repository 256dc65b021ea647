"""Times configurations of tensor_filter (and others) at 8192x8192, cold L2, each checked against the CPU engine."""
import json, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace, asdict
import numpy as np
BEGUN = time.perf_counter()
BUDGET = float(os.environ.get("BUDGET", "110"))
import leanconv
from leanconv import words
from leanconv.kernels import ALGORITHMS
from leanconv.call.gpu_call import roles_of
from leanconv.runtime.launch import open_device
from leanconv.runtime.timing import time_gpu
from leanconv.kernels.image_filter import tensor_filter as tf

by_stem = {a.stem: a for a in ALGORITHMS}
OUT = os.environ.get("OUT", ".")
DRY = "--dry" in sys.argv
if DRY:
    from tests.cases import TARGETS
    target = TARGETS[0]
else:
    device = open_device(0)
    target = device.target

def waves(problem, config, count):
    room = target.shared_per_multiprocessor // (tf.shared_bytes(problem, config) + 1024)
    blocks = max(1, min(config.min_blocks, room))
    slots = blocks * config.warps * target.multiprocessors
    return -(-problem.out_h // max(1, count * slots // tf.strips_of(problem, config.tiles)))

def tensor(problem, shapes, bands):
    found = []
    for tiles, depth, unroll, warps, shared, more in shapes:
        needs = tf.registers_needed(problem, tiles, shared)
        blocks = target.registers_per_multiprocessor // (32 * warps * -(-min(needs, 255) // 8) * 8)
        base = tf.TensorFilterConfig(0, tiles, depth, unroll, warps, shared, max(1, blocks + more))
        for band in bands:
            rows = band if isinstance(band, int) else waves(problem, base, int(band[1:]))
            found.append(("tensor_filter", replace(base, rows=rows), band))
    return found

S4 = [(2, 4, 4, 4, False, 0), (2, 8, 4, 4, False, 0), (1, 8, 4, 4, False, 0), (2, 8, 4, 2, False, 0), (2, 8, 8, 4, False, 0)]
B = [32, 64, "w1", "w2", "w3"]
def boxes():
    from leanconv.kernels.image_filter.box_scans import shared_bytes as scans_bytes
    def scans(p):
        found = []
        for c in by_stem["box_scans"].shapes(p, target):
            for warps in (8, 16, 4):
                for more in (0, 1, 2):
                    each = replace(c, warps=warps, min_blocks=c.min_blocks * 8 // warps + more)
                    room = target.shared_per_multiprocessor // (scans_bytes(p, each) + 1024)
                    if 32 * warps >= 32 * c.columns and 1 <= each.min_blocks <= min(room, 48 // warps) and not (warps == 4 and c.columns > 3):
                        found.append(("box_scans", each, "-"))
        return found
    for k in (255, 127, 63, 101, 40, 191):
        p = words.parse_problem(f"filter:8192x8192,{k}x{k},box,replicate")
        found = scans(p)[:16]
        for stem in ("box", "box_passes"):
            if k < 200 or stem == "box_passes":
                found += [(stem, c, "-") for c in list(by_stem[stem].shapes(p, target))[:2]]
        yield p, found
    for k in (31, 15, 5):
        p = words.parse_problem(f"filter:8192x8192,{k}x{k},box,replicate")
        yield p, [("box", c, "-") for c in list(by_stem["box"].shapes(p, target))[:6]]
    for n in (8192, 4096):
        for k in (191, 161, 129, 101, 251):
            p = words.parse_problem(f"filter:{n}x{n},{k}x{k},separable,replicate")
            found = [("separable_tensor", c, "-") for c in list(by_stem["separable_tensor"].configs(p, target))[:1]] if not by_stem["separable_tensor"].reasons(p, target) else []
            lengths = {}
            for cycles, c in by_stem["fourier_lines"].within(p, target):
                lengths.setdefault(c.length, c)
            yield p, found + [("fourier_lines", c, "-") for c in list(lengths.values())[:3]]

def more():
    rows = [16, 20, 24, 28, 32, 40]
    for k in ("3x3", "5x5", "7x7"):
        p = words.parse_problem(f"filter:8192x8192,{k},replicate,uint8")
        s = [(2, 8, 8, 4, False, 0), (2, 8, 8, 2, False, 0), (2, 8, 8, 8, False, 0), (2, 8, 8, 1, False, 0), (2, 4, 2, 4, False, 0), (2, 4, 1, 4, False, 0), (1, 4, 4, 2, False, 0), (2, 3, 3, 4, False, 0)]
        yield p, tensor(p, s, rows)
    for k in ("7x7", "5x5", "3x3"):
        p = words.parse_problem(f"filter:8192x8192,{k},replicate,float16")
        yield p, tensor(p, [(2, 8, 4, 2, False, 0), (2, 4, 4, 2, False, 0), (1, 4, 4, 4, False, 1), (2, 8, 8, 2, False, 0), (2, 4, 4, 1, False, 0)], rows)
    for k in ("5x5", "7x7"):
        p = words.parse_problem(f"filter:8192x8192,{k},channels3,replicate,uint8")
        yield p, tensor(p, [(1, 4, 4, 4, False, 0), (1, 8, 4, 2, False, 0), (1, 4, 4, 2, False, 0), (1, 8, 8, 2, False, 0), (1, 4, 4, 1, False, 0)], [16, 24, 32, 48, 64])
    p = words.parse_problem("filter:8192x8192,9x9,replicate")
    yield p, tensor(p, [(1, 4, 4, 4, True, 0), (1, 4, 4, 8, True, 0), (1, 4, 4, 2, True, 0), (1, 8, 8, 4, True, 0), (1, 4, 4, 4, False, 0)], [48, 64, 83, 100, 128])

def two():
    rows = [16, 24, 32, 48, 64, 96]
    for words_of in ("3x3,replicate,uint8", "5x5,replicate,uint8", "5x5,replicate,float16", "3x3,replicate,float16", "5x5,replicate,bfloat16", "3x3,channels3,replicate,uint8"):
        p = words.parse_problem(f"filter:8192x8192,{words_of}")
        found = []
        if "3x3,channels3" in words_of:  # taps side by side, to be compared with
            yield p, tensor(p, [(2, 8, 4, 4, False, 0), (2, 4, 4, 4, False, 0)], [24, 32, 48])
            continue
        for tiles, warps, depth in ((2, 4, 8), (1, 4, 8), (2, 2, 8), (1, 2, 8), (2, 4, 12), (2, 8, 8)):
            needs = tf.registers_needed(p, tiles, False, True)
            best = target.registers_per_multiprocessor // (32 * warps * -(-min(needs, 255) // 8) * 8)
            for more in ((0, 1, 2) if depth == 8 else (0, 1)):
                base = tf.TensorFilterConfig(0, tiles, depth, 4, warps, False, max(1, best + more * 4 // warps), True)
                for band in rows:
                    found.append(("tensor_filter", replace(base, rows=band), band))
        yield p, found

def jobs():
    if "--two" in sys.argv:
        yield from two()
        return
    if "--more" in sys.argv:
        yield from more()
        return
    if "--boxes" in sys.argv:
        yield from boxes()
        return
    for k in ("3x3", "5x5", "7x7"):
        p = words.parse_problem(f"filter:8192x8192,{k},replicate,uint8")
        s = S4 + ([(4, 4, 4, 4, False, 0), (4, 8, 4, 2, False, 0), (2, 8, 4, 4, False, 1)] if k != "7x7" else [(1, 4, 4, 4, False, 1), (2, 8, 4, 4, False, 1)])
        yield p, tensor(p, s, B)
    for k in ("7x7", "5x5", "3x3"):
        p = words.parse_problem(f"filter:8192x8192,{k},replicate,float16")
        yield p, tensor(p, S4[:4], [32, "w1", "w2"])
    p = words.parse_problem("filter:8192x8192,3x3,channels3,replicate,uint8")
    yield p, tensor(p, S4[:3], [32, "w1", "w2", "w3"])
    for k in ("5x5", "7x7"):
        p = words.parse_problem(f"filter:8192x8192,{k},channels3,replicate,uint8")
        s = [(1, 4, 1, 4, False, 0), (1, 4, 4, 4, False, 0), (1, 4, 4, 4, False, 1), (1, 4, 2, 4, False, 0), (1, 4, 4, 4, True, 0), (1, 8, 4, 2, False, 0)]
        yield p, tensor(p, s, [64, "w1", "w2"])
    p = words.parse_problem("filter:8192x8192,9x9,replicate")
    yield p, tensor(p, [(1, 4, 1, 4, True, 0), (1, 8, 4, 4, False, 0), (1, 4, 4, 4, True, 0), (1, 8, 4, 4, True, 0), (2, 4, 4, 4, True, 0), (1, 4, 4, 4, True, 1)], [32, "w1", "w2", "w3"])
    p = words.parse_problem("filter:8192x8192,7x7,replicate")
    yield p, tensor(p, [(1, 8, 4, 4, False, 0), (1, 8, 4, 4, True, 0), (2, 8, 4, 4, True, 0)], ["w1", "w2"]) + [("register_cache", c, "-") for c in list(by_stem["register_cache"].shapes(p, target))[:9] if hasattr(c, "columns")]
    for t in ("uint16",):
        for k in ("3x3", "5x5", "7x7"):
            p = words.parse_problem(f"filter:8192x8192,{k},replicate,{t}")
            yield p, tensor(p, S4[:3] + [(1, 4, 4, 4, False, 0)], [32, "w1", "w2"])
    p = words.parse_problem("filter:8192x8192,7x7,replicate,bfloat16")
    yield p, tensor(p, S4[:3] + [(1, 4, 4, 4, False, 0)], [32, "w1", "w2"])

def plan_of(p, stem, config):
    plan = by_stem[stem].plan(p, config, target)
    if stem != "tensor_filter":
        return plan
    def plain(launch):
        if stem != "tensor_filter":
            return launch
        return replace(launch, tuning=tuple((k, 0 if k == "rows" else v) for k, v in launch.tuning))
    return replace(plan, launches=tuple(plain(each) for each in plan.launches))

def main():
    work = list(jobs())
    if DRY:
        from leanconv.runtime.compile import compile_launch, source
        seen, pool = {}, ThreadPoolExecutor(2)
        for p, configs in work:
            for stem, c, band in configs:
                launch = plan_of(p, stem, c).launches[0]
                if source(launch) not in seen:
                    if stem != "tensor_filter" and not stem.startswith("box_scans"): continue
                    compiled = compile_launch(launch, "sm_90a")
                    seen[source(launch)] = compiled
                    print(words.format_problem(p), c, "registers", compiled.registers, "spill", compiled.spill_bytes, flush=True)
        print(len(seen), "kernels", sum(len(c) for _, c in work), "timings")
        return
    pool = ThreadPoolExecutor(14)
    futures = {}
    plans = []
    for p, configs in work:
        for stem, c, band in configs:
            plan = plan_of(p, stem, c)
            plans.append(plan)
            from leanconv.runtime.compile import source
            key = tuple(source(each) for each in plan.launches)
            if key not in futures:
                futures[key] = pool.submit(device.compiled, plan)
    results = []
    at = 0
    from leanconv.tuning.buffers import random_block
    for p, configs in work:
        x_op, w_op, *_, y_op = p.operands
        size = lambda op: int(np.prod(op.shape)) * leanconv.dtypes.DTYPES[op.dtype].bytes
        element = lambda dtype: leanconv.dtypes.DTYPES[dtype].numpy or np.uint16
        px, pw, py = (device.allocate(size(op)) for op in (x_op, w_op, y_op))
        host = np.resize(random_block(p.dtype, 1.0, 0).view(np.uint8), size(x_op))
        device.upload(px, host)
        kernel = np.random.default_rng(1).uniform(-1, 1, (p.kh, p.kw)).astype(np.float32)
        kernel = (kernel / np.abs(kernel).sum() * 1.5).astype(np.float32) if p.reduction is None else np.array([1.0 / (p.kh * p.kw)], np.float32)
        if p.rank:
            kernel = np.random.default_rng(1).uniform(0.5, 1, (1, p.kh + p.kw)).astype(np.float32)
            kernel[0, : p.kh] /= kernel[0, : p.kh].sum()
            kernel[0, p.kh :] /= kernel[0, p.kh :].sum()
        device.upload(pw, np.ascontiguousarray(kernel).reshape(-1).view(np.uint8))
        bf = p.dtype == "bfloat16"
        image = host.view(element(p.dtype)).reshape(p.h, p.w * p.channels)
        spans = [(0, 40), (p.h // 2 - 50, p.h // 2 + 50), (p.h - 40, p.h)]
        refs = []
        for a, b in spans:
            lo, hi = max(0, a - p.kh), min(p.h, b + p.kh)
            part = image[lo:hi]
            if bf:
                part = (part.astype(np.uint32) << 16).view(np.float32)
            part = part.reshape(hi - lo, p.w, p.channels) if p.channels > 1 else part
            kw = dict(border=p.border, channels_last=p.channels > 1)
            if p.rank:
                ref = leanconv.sep_filter2d(part, kernel[0, p.kh :], kernel[0, : p.kh], **kw)
            elif p.reduction is None:
                ref = leanconv.filter2d(part, kernel, anchor=p.anchor, **kw)
            else:
                ref = leanconv.box_blur(part, (p.kh, p.kw), **kw)
            refs.append(np.asarray(ref)[a - lo : a - lo + b - a].reshape(b - a, -1).astype(np.float64))
        out_row = size(y_op) // p.h
        poison = np.full(size(y_op), 0xA5, np.uint8)
        best = None
        for stem, c, band in configs:
            plan = plans[at]; at += 1
            if time.perf_counter() - BEGUN > BUDGET:
                continue
            try:
                comp = futures[tuple(source(each) for each in plan.launches)].result()
                run = device.executable(plan, roles_of(p))
                values = {x_op.role: px, w_op.role: pw, y_op.role: py, "value": 0.0, "delta": 0.0}
                scratch = []
                for role, count in (("workspace", plan.workspace_bytes), ("prepared", plan.prepared_bytes)):
                    if count:
                        scratch.append(device.allocate(count))
                        values[role] = scratch[-1]
                values = tuple(values.get(role, 0) for role in roles_of(p))
                for a, b in spans:
                    device.upload(py + a * out_row, poison[: (b - a) * out_row])
                run(0, values); device.wait(0)
                worst, bad = 0.0, 0.0
                for (a, b), ref in zip(spans, refs):
                    raw = np.empty((b - a) * out_row, np.uint8)
                    device.download(raw, py + a * out_row)
                    got = raw.view(element(p.result))
                    if bf: got = (got.astype(np.uint32) << 16).view(np.float32)
                    diff = np.abs(got.reshape(b - a, -1).astype(np.float64) - ref)
                    worst = max(worst, float(np.nan_to_num(diff, nan=np.inf).max())); bad += float((diff > 0).mean()) / 3
                timing = time_gpu(lambda: run(0, values), cold=True, budget_s=0.05, max_runs=25)
                us = timing.median_us
                for pointer in scratch:
                    device.free(pointer)
            except Exception as error:
                print(f"{words.format_problem(p)} {c} FAILED {str(error)[:200]}", flush=True)
                continue
            line = dict(problem=words.format_problem(p), stem=stem, config=asdict(c), band=band, us=round(us, 2), low=round(timing.low, 2),
                        registers=[k.registers for k in comp], spill=[k.spill_bytes for k in comp], worst=worst, unequal=round(bad, 6))
            results.append(line)
            best = min(best or (us, ""), (us, str(c)))
            print(f"{line['problem']} {stem} {band} {us:.1f} us regs {line['registers']} spill {line['spill']} worst {worst:.3g} unequal {bad:.2g} {tuple(asdict(c).values())}", flush=True)
        for pointer in (px, pw, py):
            device.free(pointer)
        print(f"== {words.format_problem(p)} best {best} at {time.perf_counter() - BEGUN:.0f} s", flush=True)
        with open(os.path.join(OUT, "boxes.json" if "--boxes" in sys.argv else "more.json" if "--more" in sys.argv else "two.json" if "--two" in sys.argv else "filters.json"), "w") as file:
            json.dump(results, file)
    print(f"elapsed {time.perf_counter() - BEGUN:.1f} s", flush=True)
main()
