"""CUTLASS as a peer: its host half, with a compiler that makes libraries for the CPU in place of nvcc."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leanconv.bench import run_suite
from leanconv.bench.ceilings import Ceilings
from leanconv.bench.peers import PEERS, Candidate, Unable, cutlass
from leanconv.bench.peers.cutlass import KERNELS, CutlassPeer
from leanconv.bench.results import GROUPS, Row, right
from leanconv.bench.suites import Case
from leanconv.problem import ConvProblem
from tests.bench.test_peers import Tensors

torch = pytest.importorskip("torch")
LAYER = ConvProblem(2, 8, 9, 10, 12, 3, 2, padding=(1, 0, 2, 1), stride=(2, 1), dilation=(1, 2))
HEADERS = "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0 \n"
#: The functions of cutlass.cu for float on the CPU, with its own struct Layer.
ON_CPU = """
#include <cstddef>
@LAYER@
struct Opened { Layer l; float *x, *w, *y; int *semaphore; };
extern "C" {
const char *leanconv_cutlass_text(int status) { return status == 4 ? "Invalid Problem" : "Internal"; }
int leanconv_cutlass_size(const Layer *l, void *, void *, void *, size_t *bytes) {
    *bytes = l->slices > 1 ? 4 : 0;
    return TILE_M == 64 && STAGES == 5 ? 4 : 0;
}
void *leanconv_cutlass_open(const Layer *l, void *x, void *w, void *y, void *workspace, int *status) {
    *status = TILE_M == 64 ? 7 : 0;
    if (*status) return nullptr;
    return new Opened{*l, (float *)x, (float *)w, (float *)y, (int *)workspace};
}
int leanconv_cutlass_run(void *opened, void *stream) {
    const auto &[l, x, w, y, semaphore] = *static_cast<Opened *>(opened);
    if (stream || (semaphore != nullptr) != (l.slices > 1)) return 7;
    for (int i = 0; i < l.n * l.p * l.q * l.k; ++i) {
        int k = i % l.k, q = i / l.k % l.q, p = i / l.k / l.q % l.p, n = i / l.k / l.q / l.p;
        double sum = 0;
        for (int r = 0; r < l.r; ++r)
            for (int s = 0; s < l.s; ++s) {
                int h = p * l.stride_h - l.top + r * l.dilation_h, v = q * l.stride_w - l.left + s * l.dilation_w;
                if (h < 0 || h >= l.h || v < 0 || v >= l.w) continue;
                for (int c = 0; c < l.c; ++c)
                    sum += x[((n * l.h + h) * l.w + v) * l.c + c] * w[((k * l.r + r) * l.s + s) * l.c + c];
            }
        y[i] = sum;
    }
    return 0;
}
void leanconv_cutlass_close(void *opened) { delete static_cast<Opened *>(opened); }
}
"""
NVCC = """#!/bin/sh
[ "$1" = --version ] && echo "release 13.0, V13.0.88" && exit
echo "$@" >> {log}
for word; do
    case "$last" in -o) out=$word;; esac
    case "$word" in -DTILE_M=256) echo "no room for this tile" >&2; exit 2;; -D*) macros="$macros $word";; esac
    last=$word
done
exec g++ -shared -fPIC -std=c++17 -DSTAGES=0 $macros -o "$out" {source}
"""


@pytest.fixture
def toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of headers, an nvcc that writes a line to ``log`` when it compiles, a cache, and a GPU."""
    header = tmp_path / "cutlass/include/cutlass/version.h"
    header.parent.mkdir(parents=True)
    header.write_text(HEADERS)
    layer = cutlass.SOURCE.read_text().partition("struct Layer {")[2].partition("};")[0]
    (tmp_path / "cpu.cpp").write_text(ON_CPU.replace("@LAYER@", f"struct Layer {{{layer}}};"))
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(NVCC.format(log=tmp_path / "log", source=tmp_path / "cpu.cpp"))
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(nvcc.parent), prepend=":")
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "cutlass"))
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("LEANCONV_NO_CACHE", raising=False)
    monkeypatch.setattr(cutlass, "_target", lambda: ("sm_80", 132))
    monkeypatch.setattr(cutlass, "missing_cuda_torch", lambda: None)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for each in (cutlass._built, cutlass._library, cutlass._nvcc_version, cutlass._temporary):
        each.cache_clear()  # type: ignore[attr-defined]


def only(monkeypatch: pytest.MonkeyPatch, *engines: str) -> None:
    monkeypatch.setattr(cutlass, "KERNELS", tuple(k for k in KERNELS if k.engine in engines))


def test_each_tile_is_a_row_that_computes_the_layer(toolchain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails, runs, refused, unopened = (
        f"cutlass:{name}-nhwc" for name in ("tf32-256x128x3", "3xtf32-128x64x4", "tf32-64x64x5", "3xtf32-64x64x3")
    )
    only(monkeypatch, fails, runs, refused, unopened, "cutlass:float16-128x64x3-nhwc", "cutlass:tf32-wgmma-64x64-nhwc")
    peer = CutlassPeer()
    assert peer.absent() is None and peer.versions() == {"cutlass": "4.2.0", "nvcc": "13.0.88"}
    peer.prepare([LAYER, replace(LAYER, dtype="float16", groups=2)], gpu=True)
    commands = (toolchain / "log").read_text().splitlines()
    assert len(commands) == 4 and all("-arch=sm_80 -DELEMENT=float " in each for each in commands)
    tensors: Any = Tensors(LAYER)
    found = {}
    for each in peer.candidates(LAYER, tensors, gpu=True):
        if isinstance(each, Candidate):  # while the kernel is open
            assert tensors.error(each) < 1e-6 and each.call() is each.out
            assert each.arithmetic == "tf32x3" and each.layout == "NHWC" and each.note == "tile 128×64×16"
            found[each.engine, each.algorithm] = each.workspace_bytes
        else:
            found[each.engine, "cannot"] = each.reason
    # six taps of one step each: too short for two slices of four
    assert found == {
        (fails, "cannot"): "nvcc failed with 2: no room for this tile",
        (runs, "fprop"): 0,
        (refused, "cannot"): "CUTLASS says 'Invalid Problem' (4)",
        (unopened, "cannot"): "CUTLASS says 'Internal' (7)",
    }
    assert len((toolchain / "log").read_text().splitlines()) == 4, "compiled again"


def test_few_tiles_share_the_reduction(toolchain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "cutlass:tf32-128x128x3-nhwc")
    (kernel,) = cutlass.KERNELS
    deep = replace(LAYER, c=72)  # one tile; 6 taps of 3 steps are 4 slices of at least 4
    assert [kernel.slices(deep, many) for many in (1, 2, 3, 132)] == [1, 2, 3, 4]
    tensors: Any = Tensors(deep)
    errors = {each.algorithm: tensors.error(each) for each in CutlassPeer().candidates(deep, tensors, gpu=True)}  # type: ignore[union-attr]
    assert list(errors) == ["fprop", "fprop, split-K 4"] and max(errors.values()) < 1e-6
    assert kernel.slices(replace(deep, n=10_000), 132) == 1, "tiles for every multiprocessor"
    assert kernel.slices(replace(deep, c=4000), 132) == 16
    assert replace(kernel, stages=0).slices(deep, 132) == 1, "CUTLASS 3 has none here"


def test_libraries_are_kept_by_what_determines_them(toolchain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "cutlass:tf32-128x64x3-nhwc")
    (kernel,) = cutlass.KERNELS

    def made() -> Any:
        forget()
        return cutlass._built(kernel, "sm_80")

    first = made()
    assert first == made() and first.parent == toolchain / "cache/cutlass"
    assert [each.name for each in first.parent.iterdir()] == [first.name]
    assert cutlass._built(kernel, "sm_86") != first != cutlass._built(replace(kernel, math="3xtf32"), "sm_80")
    version = toolchain / "cutlass/include/cutlass/version.h"
    version.write_text(HEADERS.replace("CUTLASS_PATCH 0", "CUTLASS_PATCH 1"))
    assert made() != first
    monkeypatch.setenv("LEANCONV_NO_CACHE", "1")
    assert (temporary := made()).is_file() and toolchain not in temporary.parents
    forget()
    assert not temporary.exists()


def test_what_it_is_not_written_for_is_said() -> None:
    others = {
        "forward pass of one group": [replace(LAYER, op="dgrad"), replace(LAYER, groups=4), replace(LAYER, bias=True)],
        "float32, float16 and bfloat16": [replace(LAYER, dtype="int8")],
        "multiples of 4,": [replace(LAYER, c=3), replace(LAYER, k=6)],
        "multiples of 8,": [replace(LAYER, dtype="bfloat16", k=8, c=4)],
    }
    for words, problems in others.items():
        for problem in problems:
            (unable,) = CutlassPeer().candidates(problem, None, gpu=True)  # type: ignore[arg-type]
            assert isinstance(unable, Unable) and words in unable.reason, problem


def test_kernels_are_those_of_the_type_and_of_the_gpu() -> None:
    assert {k.math for k in cutlass._of(["float32"], "sm_90a")} == {"tf32", "3xtf32"}
    assert {k.math for k in cutlass._of(["float16"], "sm_80")} == {"float16"}
    for arch in ("sm_80", "sm_90a", "sm_100a"):
        assert any(not k.stages for k in cutlass._of(["float32"], arch)) == (arch == "sm_90a")
    for kernel in KERNELS:
        if kernel.stages:
            warps = [tile // warp for tile, warp in zip(kernel.tile, kernel.warp, strict=False)]
            assert warps[0] * warps[1] in (4, 8), kernel
            shared = kernel.stages * (kernel.tile[0] + kernel.tile[1]) * kernel.tile[2]
            assert shared * (4 if "tf32" in kernel.math else 2) <= 227 * 1024, kernel


@pytest.mark.parametrize(("capability", "arch"), [((8, 6), "sm_86"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")])
def test_code_is_for_this_gpu(capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: {3: about}[device])
    assert cutlass._target() == (arch, 7)


def test_three_products_have_a_third_of_the_ceiling() -> None:
    ceilings, layer = Ceilings(1.0, 6.0, 1e6, "", 12.0), ConvProblem(1, 64, 64, 64, 64, 3, 3)
    tf32, three, halves = (ceilings.floor_us(layer, kind) for kind in ("tf32", "tf32x3", "fp16x3"))
    assert three == pytest.approx(3 * tf32) and halves == pytest.approx(three / 2)
    none = replace(ceilings, tf32_tflops=None)
    assert none.floor_us(layer, "tf32x3") == pytest.approx(ceilings.floor_us(layer, "fp32"))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("CUTLASS_PATH", "/nowhere", "there is no include/cutlass/version.h in /nowhere"), ("PATH", "/", "nvcc")],
)
def test_what_is_missing_is_named(name: str, value: str, words: str, toolchain: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(cutlass.shutil, "which", lambda given: None) if name == "PATH" else None
    assert words in str(CutlassPeer().absent())


def test_the_wheel_is_found_and_told_of(toolchain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTLASS_PATH")
    (toolchain / "cutlass").rename(toolchain / "source")
    spec = SimpleNamespace(origin=str(toolchain / "__init__.py"))
    monkeypatch.setattr(cutlass, "find_spec", lambda name: spec if name == "cutlass_library" else None)
    assert CutlassPeer().absent() is None and cutlass._root() == toolchain / "source"
    monkeypatch.setattr(cutlass, "find_spec", lambda name: None)
    assert "pip install nvidia-cutlass" in str(CutlassPeer().absent())


def test_3xtf32_has_to_be_as_right_as_float32() -> None:
    figures: Any = {"us_low": 1, "us_high": 1, "runs": 1, "tflops": 1, "ceiling": "", "ceiling_share": 1, "l2": ""}
    row = Row("a", "", "fprop", 1, workspace_bytes=0, error=3e-4, checked="all", **figures)
    assert right(replace(row, engine="cutlass:tf32-64x64x5-nhwc")) and right(replace(row, engine="torch-tf32-nchw"))
    assert not right(replace(row, engine="cutlass:3xtf32-64x64x3-nhwc"))
    groups = {k.math: [g.name for g in GROUPS if g.holds(replace(row, engine=k.engine), "NHWC")] for k in KERNELS}
    assert groups == {
        "tf32": ["CUTLASS, TF32"], "3xtf32": ["CUTLASS"],
        "float16": ["CUTLASS, 16 bits"], "bfloat16": ["CUTLASS, 16 bits"],
    }  # fmt: skip


def test_a_run_names_it_where_it_is_absent() -> None:
    peer = next(each for each in PEERS if each.name == "cutlass")
    done = run_suite([Case("layer", LAYER)], device="cpu", quick=True, progress=False, peers=(peer,), seconds=0)
    assert done.absent["cutlass"] and CutlassPeer.engines == tuple(kernel.engine for kernel in KERNELS)


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The real compiler and headers, where they are installed."""
    try:
        cutlass._nvcc_version(cutlass._nvcc())
        cutlass._root()
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(str(error))
    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path))
    forget()
    yield
    forget()


def test_nvcc_compiles_it(real: None) -> None:
    path = cutlass._built(next(k for k in KERNELS if k.engine == "cutlass:3xtf32-64x64x3-nhwc"), "sm_80")
    assert isinstance(path, Path), path
    assert cutlass._library(path).leanconv_cutlass_text(0) == b"Success"


@pytest.mark.gpu
def test_a_gpu_computes_the_layer(real: None, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = {"tf32-64x64x5": 1e-3, "tf32-wgmma-64x64": 1e-3, "3xtf32-64x64x3": 2e-6}
    only(monkeypatch, *(f"cutlass:{name}-nhwc" for name in bounds))
    layers = (replace(LAYER, c=72), ConvProblem(3, 64, 14, 14, 72, 3, 3, padding=(1, 1, 1, 1)))
    cases = [Case(str(layer), layer) for layer in layers]
    done = run_suite(cases, device="cuda", quick=True, progress=False, peers=(CutlassPeer(),))
    assert not done.failed and not done.skipped
    kinds = len(cutlass._of(["float32"], cutlass._target()[0]))
    assert len({(row.problem, row.engine) for row in done.rows}) == kinds * len(cases)
    assert any("split-K" in row.algorithm and row.workspace_bytes for row in done.rows)
    for row in done.rows:
        assert row.error is not None and row.error < bounds[row.engine[len("cutlass:") : -len("-nhwc")]], row
