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

def jobs():
    for text in ("3x3,replicate,uint8", "5x5,replicate,uint8", "7x7,replicate,uint8", "7x7,replicate,float16", "5x5,replicate,float16",
                 "3x3,replicate,float16", "3x3,channels3,replicate,uint8", "5x5,channels3,replicate,uint8", "7x7,channels3,replicate,uint8",
                 "7x7,replicate,bfloat16", "7x7,replicate,uint16", "9x9,replicate", "5x5,replicate,int8", "3x3,channels4,replicate,uint8",
                 "7x7,channels4,replicate,uint8", "11x11,replicate", "15x15,replicate", "9x9,replicate,uint8", "11x11,replicate,uint8"):
        p = words.parse_problem(f"filter:8192x8192,{text}")
        found = []
        configs = list(by_stem["tensor_filter"].configs(p, target))
        for c in configs[:3]:
            for rows in dict.fromkeys((c.rows, 24, 32, 40, 48, 64, 80)):
                found.append(("tensor_filter", replace(c, rows=rows), rows))
        first = configs[0]
        if first.two_rows and first.tiles == 2:
            for depth in (6, 12):
                for rows in (32, 48):
                    found.append(("tensor_filter", replace(first, depth=depth, rows=rows), rows))
            found += [("tensor_filter", replace(first, warps=w, min_blocks=16 // w, rows=rows), rows) for w in (1, 2, 8) for rows in (32, 48)]
        found += [("tensor_filter", c, c.rows) for c in configs[3:]]
        yield p, found

def plan_of(p, stem, config):
    return by_stem[stem].plan(p, config, target)

def main():
    work = list(jobs())
    if DRY:
        from leanconv.runtime.compile import compile_launch, source
        seen, pool = {}, ThreadPoolExecutor(2)
        for p, configs in work:
            for stem, c, band in configs:
                launch = plan_of(p, stem, c).launches[0]
                if source(launch) not in seen:
                    if stem != "tensor_filter" : continue
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
                timing = time_gpu(lambda: run(0, values), cold=True, budget_s=0.03, max_runs=15)
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
        with open(os.path.join(OUT, "filters5.json"), "w") as file:
            json.dump(results, file)
    print(f"elapsed {time.perf_counter() - BEGUN:.1f} s", flush=True)
main()
