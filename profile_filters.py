"""Runs one kernel a few times for ncu: profile_filters.py WORDS STEM [field=value ...]"""
import sys
from dataclasses import replace
import numpy as np
from leanconv import words
from leanconv.call.gpu_call import roles_of
from leanconv.dtypes import DTYPES
from leanconv.kernels import ALGORITHMS
from leanconv.runtime.launch import open_device
from leanconv.tuning.buffers import random_block
device = open_device(0)
p = words.parse_problem(sys.argv[1])
algorithm = next(a for a in ALGORITHMS if a.stem == sys.argv[2])
config = next(iter(algorithm.configs(p, device.target)))
values = {k: {"True": True, "False": False}.get(v, None) if v in ("True", "False") else int(v) for k, v in (a.split("=") for a in sys.argv[3:])}
config = replace(config, **values)
print(config, flush=True)
plan = algorithm.plan(p, config, device.target)
pointers = {"value": 0.0, "delta": 0.0}
for i, op in enumerate(p.operands):
    count = int(np.prod(op.shape)) * DTYPES[op.dtype].bytes
    pointers[op.role] = device.allocate(count)
    if not op.written:
        device.upload(pointers[op.role], np.resize(random_block(op.dtype, 0.1, i).view(np.uint8), count))
run = device.executable(plan, roles_of(p))
for _ in range(3):
    run(0, tuple(pointers.get(role, 0) for role in roles_of(p)))
    device.wait(0)
